"""Weights that stay on GPUs: mapped between two processes of one GPU, broadcast between two GPUs."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends import transfer_ipc
from engine.backends.base import RolloutEngine
from engine.backends.device import gpu_indices
from engine.backends.engines import build_engine
from engine.backends.transfer import describe, require_arrived
from engine.backends.transfer_broadcast import Endpoint, Sender, first_rank, listen
from engine.backends.transfer_ipc import Exporter, merged
from engine.backends.weight_sync import LOGPROB_BOUNDS, probe_sequences, verify_served
from tests.helpers.engines import rollout_spec
from tests.helpers.tiny import VOCAB_SIZE, named_weights, tiny_folder, tiny_model

PROBES = probe_sequences(VOCAB_SIZE, seed=7)
HANG_S = 300


class Trainer:
    """A process that holds the trainer's weights on a GPU and does what it is told."""

    def __init__(self, device: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, device), daemon=True)
        self._process.start()

    def __call__(self, method: str, *arguments: Any) -> Any:
        self._ours.send((method, arguments))
        if not self._ours.poll(HANG_S):
            raise TimeoutError(method)
        return self._ours.recv()

    def close(self) -> None:
        self._process.kill()
        self._process.join()


class Held:
    """What that process can do."""

    def export(self, seed: int) -> Any:
        self._exporter = Exporter(_weights(seed).items(), seed)
        return self._exporter.exported

    def release(self) -> None:
        self._exporter.release()

    def listen(self) -> Endpoint:
        return listen(1, 1)

    def join(self, endpoint: Endpoint) -> None:
        self._sender = Sender(endpoint)

    def describe(self, seed: int) -> Any:
        return describe(_weights(seed).items(), seed)

    def broadcast(self, seed: int) -> None:
        self._sender.send(_weights(seed).items())

    def score(self, seed: int) -> list[list[float]]:
        model, scores = _model(seed), []
        for probe in PROBES:
            ids = torch.tensor([probe], device="cuda")
            with torch.no_grad():
                logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
            scores.append(logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist())
        return scores


def _serve(connection: Connection, device: int) -> None:
    torch.cuda.set_device(device)
    held = Held()
    while True:
        method, arguments = connection.recv()
        connection.send(held.__class__.__dict__[method](held, *arguments))


def _model(seed: int) -> Any:
    return tiny_model(seed, scale=4.0).bfloat16().cuda()


def _weights(seed: int) -> dict[str, torch.Tensor]:
    return dict(named_weights(_model(seed)))


@contextmanager
def pair(folder: Path, transport: str, device: int, **options: Any) -> Iterator[tuple[Trainer, RolloutEngine]]:
    trainer = Trainer(device)
    spec = rollout_spec(tiny_folder(folder / "model"), dtype="bfloat16", transport=transport, **options)
    engine = build_engine(spec, "vllm")
    try:
        yield trainer, engine
    finally:
        engine.close()
        trainer.close()


def require_served(trainer: Trainer, engine: RolloutEngine, seed: int) -> None:
    versions = {"served_version": seed, "trained_version": seed}
    verify_served(engine.score(PROBES), trainer("score", seed), bound=LOGPROB_BOUNDS["bfloat16"], **versions)


def test_weights_mapped_from_a_trainer_on_the_same_gpu_are_served_after_every_sleep(tmp_path: Path) -> None:
    with pair(tmp_path, "ipc", 0, shares_gpu=True) as (trainer, engine):
        engine.join_senders(transfer_ipc.INIT)
        for seed in (1, 2):
            engine.wake()
            exported = merged([trainer("export", seed)])
            arrived = engine.load_sent(exported.update_info(), version=seed)
            trainer("release")
            require_arrived(exported.manifest, arrived)
            require_served(trainer, engine, seed)
            engine.sleep()


def test_weights_broadcast_from_another_gpu_are_served(tmp_path: Path) -> None:
    if len(gpu_indices()) < 2:
        pytest.skip("one CUDA device; a broadcast goes from one to another")
    with pair(tmp_path, "broadcast", 1) as (trainer, engine), ThreadPoolExecutor(1) as beside:
        endpoint = trainer("listen")
        joining = beside.submit(trainer, "join", endpoint)
        engine.join_senders(endpoint.init_info(first_rank(0, 1)))
        joining.result()
        for seed in (1, 2):
            manifest = trainer("describe", seed)
            sending = beside.submit(trainer, "broadcast", seed)
            arrived = engine.load_sent(manifest.update_info(), version=seed)
            sending.result()
            require_arrived(manifest, arrived)
            require_served(trainer, engine, seed)
