"""Weights that vLLM's transfer engine is sent are served, checked and told about; the tensors travel by hand, not by GPU."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from engine.backends.transfer import describe, require_arrived
from engine.backends.weight_sync import probe_sequences
from engine.errors import DivergedError, StoreError, TransientError
from tests.helpers.engines import logprobs_of, shared_vllm
from tests.helpers.tiny import VOCAB_SIZE, named_weights, tiny_model

from vllm.distributed.weight_transfer.base import (  # isort: skip - the settings of the backend come first
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)


@dataclass
class Init(WeightTransferInitInfo):
    """Nothing to agree on."""


@dataclass
class Update(WeightTransferUpdateInfo):
    """What is announced, and the tensors themselves."""

    names: list[str]
    shapes: list[list[int]]
    dtype_names: list[str]
    tensors: list[torch.Tensor] = field(default_factory=list)


class ByHand(WeightTransferEngine[Init, Update]):
    """vLLM's own life cycle of an update around tensors of this process."""

    init_info_cls, update_info_cls = Init, Update

    def init_transfer_engine(self, init_info: Init) -> None: ...

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Update) -> None:
        """In two messages, as a packed transfer comes in several."""
        pairs = list(zip(update_info.names, update_info.tensors, strict=True))
        self.model.load_weights(pairs[:5])
        self.model.load_weights(pairs[5:])

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None: ...


def _install(worker: Any) -> None:
    from vllm.config.weight_transfer import WeightTransferConfig

    worker.worker.weight_transfer_engine = ByHand(  # the worker itself, behind the wrapper that the engine calls
        WeightTransferConfig(backend="by_hand"), worker.vllm_config, worker.device, worker.get_model()
    )


@pytest.fixture(scope="module")
def engine():
    shared = shared_vllm()
    shared._llm.collective_rpc(_install)
    shared.join_senders({})
    return shared


def send(engine, weights: dict[str, torch.Tensor], version: int) -> list[dict[str, int]]:
    manifest = describe(weights.items(), version)
    return engine.load_sent({**manifest.update_info(), "tensors": list(weights.values())}, version=version)


@pytest.mark.parametrize("seed", [1, 2])
def test_what_was_sent_is_served_and_every_tensor_is_confirmed(engine, seed):
    """Twice, because vLLM repacks what it has loaded."""
    model = tiny_model(seed)
    weights = named_weights(model)
    arrived = send(engine, weights, seed)
    require_arrived(describe(weights.items(), seed), arrived)
    for probe, found in zip(
        probe_sequences(VOCAB_SIZE, seed=7), engine.score(probe_sequences(VOCAB_SIZE, seed=7)), strict=True
    ):
        expected = logprobs_of(model, probe[:1], tuple(probe[1:]))
        torch.testing.assert_close(torch.tensor(found), expected, atol=1e-4, rtol=0)


def test_bytes_that_changed_on_the_way_are_found(engine):
    weights = named_weights(tiny_model(1))
    manifest = describe(weights.items(), 3)
    name = "model.norm.weight"
    arrived = send(engine, {**weights, name: weights[name] * 1.5}, 3)
    with pytest.raises(TransientError, match=f"another {name}"):
        require_arrived(manifest, arrived)


def test_weights_that_are_not_finite_or_of_another_model_are_not_served(engine):
    weights = named_weights(tiny_model(1))
    name = "model.norm.weight"
    with pytest.raises(DivergedError, match=f"{name} of version 4 holds values that are not finite"):
        send(engine, {**weights, name: weights[name] / 0}, 4)
    with pytest.raises(TransientError, match="holds no weights"):
        engine.score([[1, 2, 3]])
    with pytest.raises(StoreError, match="unknown extra"):
        send(engine, {**weights, "extra": weights[name]}, 5)
    send(engine, weights, 6)
    assert engine.score([[1, 2, 3]])
