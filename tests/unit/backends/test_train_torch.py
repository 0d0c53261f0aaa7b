"""The plain torch trainer in one process."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.backends.base import Trainer
from engine.backends.trainers import build_trainer
from engine.errors import DivergedError, HybridFlowError, ShapeError, StoreError
from tests.helpers.reference_training import train_in_one_go
from tests.helpers.training import (
    TokenLoss,
    model_folder,
    poisoned,
    random_batch,
    response_logprobs,
    tokens_of,
    trainer_spec,
)

TORCH = {"backend": "torch", "eps": 1e-4, "schedule": "linear", "warmup_steps": 1}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model") / "policy")


def learn(trainer: Trainer, steps: range) -> None:
    for step in steps:
        batch = random_batch(6, seed=step)
        trainer.step(batch.split([2, 4]), TokenLoss(tokens_of(batch)))


def assert_equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def test_it_trains_as_the_definition_says(source: Path) -> None:
    spec = trainer_spec(source, **TORCH)
    reference = train_in_one_go(source, [random_batch(6, seed=step) for step in range(3)], spec)
    trainer = build_trainer(spec)
    learn(trainer, range(3))
    assert trainer.steps == 3
    for name, weight in trainer.weights().items():
        torch.testing.assert_close(weight, reference.weights[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [[3, 3], [1, 1, 2, 1, 1]])
def test_micro_batches_change_neither_metrics_nor_gradient(sizes: list[int], source: Path) -> None:
    batch = random_batch(6)
    loss = TokenLoss(tokens_of(batch))
    whole, cut = (build_trainer(trainer_spec(source, **TORCH)) for _ in range(2))
    expected = whole.step([batch], loss).values()
    assert cut.step([part.trim() for part in batch.split(sizes)], loss).values() == pytest.approx(expected, rel=1e-6)
    moments = cut.optimizer_state()
    assert max(float((moments[name] - tensor).abs().max()) for name, tensor in whole.optimizer_state().items()) < 1e-6


def test_a_gradient_that_is_not_finite_leaves_everything_as_it_was(source: Path) -> None:
    trainer, undisturbed = (build_trainer(trainer_spec(source, **TORCH)) for _ in range(2))
    learn(trainer, range(1))
    weights, state = trainer.weights(), trainer.optimizer_state()
    with pytest.raises(DivergedError, match="gradient norm is nan"):
        trainer.step([random_batch(2)], poisoned)
    assert_equal(trainer.weights(), weights)
    assert_equal(trainer.optimizer_state(), state)
    assert trainer.steps == 1
    learn(trainer, range(1, 2))
    learn(undisturbed, range(2))
    assert_equal(trainer.weights(), undisturbed.weights())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_interrupted_run_ends_with_the_same_bits(dtype: str, source: Path) -> None:
    spec = trainer_spec(source, dtype=dtype, **TORCH)
    trainer, resumed = build_trainer(spec), build_trainer(spec)
    learn(trainer, range(2))
    resumed.load_weights(trainer.weights())
    resumed.load_optimizer_state(trainer.optimizer_state())
    assert resumed.steps == 2
    for each in (trainer, resumed):
        learn(each, range(2, 4))
    assert_equal(resumed.weights(), trainer.weights())
    assert_equal(resumed.optimizer_state(), trainer.optimizer_state())


def test_in_bfloat16_small_updates_are_not_lost(source: Path) -> None:
    """A rate of 1e-6 is below what bfloat16 weights can show; the masters move all the same."""
    options = {**TORCH, "lr": 1e-6, "schedule": "constant", "weight_decay": 0.0}
    trainer = build_trainer(trainer_spec(source, dtype="bfloat16", **options))
    before = trainer.optimizer_state()
    learn(trainer, range(3))
    name = "model.layers.0.self_attn.q_proj.weight/master"
    moved = trainer.optimizer_state()[name] - before[name]
    assert moved.dtype == torch.float32
    assert 0 < float(moved.abs().max()) < 5e-6


def test_snapshots_do_not_change_with_later_steps(source: Path) -> None:
    trainer = build_trainer(trainer_spec(source, **TORCH))
    weights, state = trainer.weights(), trainer.optimizer_state()
    copies = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in (weights, state)]
    learn(trainer, range(1))
    assert_equal(weights, copies[0])
    assert_equal(state, copies[1])


def test_a_step_without_anything_to_learn_from_is_refused(source: Path) -> None:
    with pytest.raises(ShapeError, match="without a single micro-batch"):
        build_trainer(trainer_spec(source, **TORCH)).step([], poisoned)


def test_states_and_weights_of_another_model_are_refused_by_name(source: Path) -> None:
    trainer = build_trainer(trainer_spec(source, **TORCH))
    state, weights = trainer.optimizer_state(), trainer.weights()
    del state["model.norm.weight/exp_avg"]
    with pytest.raises(StoreError, match=r"missing model\.norm\.weight/exp_avg"):
        trainer.load_optimizer_state(state)
    weights["model.norm.weight"] = torch.ones(63)
    with pytest.raises(StoreError, match=r"model\.norm\.weight is \[63\] instead of \[64\]"):
        trainer.load_weights(weights)


def test_a_frozen_model_scores_and_refuses_to_learn(source: Path) -> None:
    batch = random_batch(4)
    for backend in ({"backend": "torch"}, {"backend": "deepspeed", "zero_stage": 2}):
        frozen = build_trainer(trainer_spec(source, frozen=True, **backend))
        trained = build_trainer(trainer_spec(source, **TORCH))
        assert torch.equal(frozen.score([batch], response_logprobs)[0], trained.score([batch], response_logprobs)[0])
        with pytest.raises(HybridFlowError, match="frozen model was trained"):
            frozen.step([batch], poisoned)
