"""Rollout engines on a GPU, in bfloat16 and with CUDA graphs: what is served is what was loaded, seeds and sync hold."""

from collections.abc import Iterator

import pytest
import torch

from engine.backends.device import free_gpu_bytes
from engine.backends.engines import build_engine
from engine.backends.weight_sync import (
    LOGPROB_BOUNDS,
    exchange_folder,
    probe_sequences,
    publish,
    receive,
    retract,
    verify_served,
)
from engine.errors import ConfigError, DivergedError
from tests.helpers.engines import rollout_spec
from tests.helpers.tiny import BOS, VOCAB_SIZE, named_weights, tiny_folder, tiny_model

PROMPTS = [[BOS, 5, 6, 7], [BOS, 40, 41], [BOS, *range(10, 60)]]
BOUND = LOGPROB_BOUNDS["bfloat16"]


@pytest.fixture(scope="module", params=["vllm", "hf"])
def engine(request, tmp_path_factory) -> Iterator:
    spec = rollout_spec(tiny_folder(tmp_path_factory.mktemp("model")), dtype="bfloat16")
    built = build_engine(spec, request.param)
    yield built
    built.close()


def model_on_gpu(seed: int):
    return tiny_model(seed, scale=4.0).bfloat16().cuda()


def load(engine, model, version: int) -> None:
    engine.wake()
    handle = publish(named_weights(model), exchange_folder("gpu-test"), version)
    engine.load_weights(receive(handle), version=version)
    retract(handle)


def scores_of(model, sequences: list[list[int]]) -> list[list[float]]:
    scores = []
    for sequence in sequences:
        ids = torch.tensor([sequence], device="cuda")
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
        scores.append(logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist())
    return scores


def test_every_sync_is_served_and_stale_weights_are_found(engine):
    probes = probe_sequences(VOCAB_SIZE, seed=7)
    versions = {"served_version": 1, "trained_version": 1}
    first, second = model_on_gpu(1), model_on_gpu(2)
    load(engine, first, 1)
    verify_served(engine.score(probes), scores_of(first, probes), bound=BOUND, **versions)
    with pytest.raises(DivergedError):
        verify_served(engine.score(probes), scores_of(second, probes), bound=BOUND, **versions)
    load(engine, second, 2)
    verify_served(engine.score(probes), scores_of(second, probes), bound=BOUND, **versions)


def test_sampled_logprobs_are_those_of_the_model(engine):
    model = model_on_gpu(1)
    load(engine, model, 1)
    responses = engine.generate(PROMPTS * 8, list(range(24)), temperature=1.0, max_tokens=24)
    for prompt, one in zip(PROMPTS * 8, responses, strict=True):
        expected = scores_of(model, [[*prompt, *one.token_ids]])[0][len(prompt) - 1 :]
        gap = sum(abs(ours - theirs) for ours, theirs in zip(one.logprobs, expected, strict=True)) / len(expected)
        assert gap < BOUND


def test_the_same_seeds_give_the_same_samples(engine):
    load(engine, model_on_gpu(1), 1)
    once = engine.generate(PROMPTS, [1, 2, 3], temperature=1.0, max_tokens=24)
    assert once == engine.generate(PROMPTS, [1, 2, 3], temperature=1.0, max_tokens=24)
    assert once != engine.generate(PROMPTS, [4, 5, 6], temperature=1.0, max_tokens=24)


def test_an_engine_that_shares_its_gpu_sleeps_and_serves_new_weights_after_waking(tmp_path):
    spec = rollout_spec(tiny_folder(tmp_path / "model"), dtype="bfloat16", shares_gpu=True)
    engine = build_engine(spec, "vllm")
    try:
        asleep = free_gpu_bytes()
        probes = probe_sequences(VOCAB_SIZE, seed=7)
        for version in (1, 2):
            model = model_on_gpu(version)
            load(engine, model, version)
            assert free_gpu_bytes() < asleep - 2**30
            versions = {"served_version": version, "trained_version": version}
            verify_served(engine.score(probes), scores_of(model, probes), bound=BOUND, **versions)
            assert engine.sleep() and not engine.sleep()
            assert free_gpu_bytes() > asleep - 2**28
        held = torch.empty(int(free_gpu_bytes() * 0.9), dtype=torch.uint8, device="cuda")
        with pytest.raises(ConfigError, match="gpu_memory_utilization"):
            engine.wake()
        del held
    finally:
        engine.close()
