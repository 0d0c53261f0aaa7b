"""Low-rank adapters: what is trained, what is handed out, and that a snapshot goes on exactly where it was taken."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.base import Trainer
from engine.backends.trainers import build_trainer
from engine.config import LoraConfig
from engine.errors import ConfigError
from tests.helpers.tensors import assert_equal
from tests.helpers.training import TokenLoss, model_folder, random_batch, response_logprobs, tokens_of, trainer_spec

LORA = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "down_proj"))
BACKENDS = ["torch", "fsdp"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model") / "policy", tied=True)


def build(source: Path, **options: Any) -> Trainer:
    return build_trainer(trainer_spec(source, **{"lora": LORA, "eps": 1e-4, "lr": 1e-2, "backend": "torch", **options}))


def learn(trainer: Trainer, steps: range) -> list[dict[str, float]]:
    results = []
    for step in steps:
        batch = random_batch(6, seed=step)
        results.append(trainer.step(batch.split([2, 4]), TokenLoss(tokens_of(batch))).values())
    return results


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_snapshot_goes_on_exactly_where_it_was_taken(backend: str, dtype: str, source: Path) -> None:
    """Also in a trainer that begins with the merged weights, as one built from a saved folder does."""
    trainer = build(source, backend=backend, dtype=dtype, gradient_checkpointing=True)
    before = trainer.weights()
    learn(trainer, range(2))
    weights, state = trainer.weights(), trainer.optimizer_state()
    changed = sorted(name for name in weights if not torch.equal(weights[name], before[name]))
    assert changed == [
        f"model.layers.{n}.{part}.weight" for n in (0, 1) for part in ("mlp.down_proj", "self_attn.q_proj")
    ]
    assert {name.split("/")[0] for name in state if not name.endswith("/base")} - {"step"} == {
        f"{name.removesuffix('.weight')}.lora_{factor}.weight" for name in changed for factor in "AB"
    }
    again = build(source, backend=backend, dtype=dtype, gradient_checkpointing=True)
    again.load_weights(weights)
    again.load_optimizer_state(state)
    assert_equal(again.weights(), weights)
    assert_equal(again.optimizer_state(), state)
    assert learn(again, range(2, 4)) == learn(trainer, range(2, 4))
    assert_equal(again.weights(), trainer.weights())


@pytest.mark.parametrize("backend", BACKENDS)
def test_merged_weights_score_as_the_adapter_does(backend: str, source: Path) -> None:
    """In float32, to 1e-5 nats."""
    trainer = build(source, backend=backend)
    learn(trainer, range(3))
    plain = build_trainer(trainer_spec(source, frozen=True, backend="torch"))
    batch = random_batch(8, seed=9)
    start = plain.score([batch], response_logprobs)[0]
    plain.load_weights(trainer.weights())
    merged = plain.score([batch], response_logprobs)[0]
    torch.testing.assert_close(trainer.score([batch], response_logprobs)[0], merged, rtol=0, atol=1e-5)
    assert float((merged - start).abs().max()) > 0.1


def test_backends_train_the_same_adapter(source: Path) -> None:
    found = {backend: learn(build(source, backend=backend), range(3)) for backend in BACKENDS}
    for left, right in zip(found["torch"], found["fsdp"], strict=True):
        assert left == pytest.approx(right, rel=1e-5)


def test_new_weights_start_with_a_new_adapter(source: Path) -> None:
    """As the start checkpoint does after supervised steps, in a process that goes on and in one that begins."""
    used, fresh = build(source), build(source)
    learn(used, range(2))
    start = used.weights()
    for trainer in (used, fresh):
        trainer.load_weights(start)
        trainer.reset_optimizer(trainer.spec.optimizer, 5)
    assert learn(used, range(2)) == learn(fresh, range(2))
    assert_equal(used.weights(), fresh.weights())


def test_a_frozen_model_and_a_critic_have_no_adapter(source: Path) -> None:
    batch = random_batch(4)
    reference = build(source, frozen=True).score([batch], response_logprobs)
    plain = build_trainer(trainer_spec(source, frozen=True)).score([batch], response_logprobs)
    assert torch.equal(reference[0], plain[0])
    assert not any("lora" in name for name in build(source, head="value", backend="torch").optimizer_state())


def test_a_target_that_is_not_there_is_named(source: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.lora.targets\[1\] = 'qq_proj': no linear layer has this name"):
        build(source, backend="torch", lora=LoraConfig(targets=("q_proj", "qq_proj")))
