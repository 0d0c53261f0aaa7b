"""Every optimiser on every backend with two ranks follows its definition, and its state goes on in plain torch."""

from pathlib import Path
from typing import Any

import pytest

from engine.backends.base import Trainer
from engine.backends.trainers import build_trainer
from engine.batch import Batch
from engine.config import OptimizerConfig
from engine.errors import HybridFlowError
from tests.helpers.processes import Ranks
from tests.helpers.reference_training import Reference, train_in_one_go
from tests.helpers.tensors import assert_equal, gap
from tests.helpers.training import TokenLoss, model_folder, random_batch, tokens_of, trainer_spec

STEPS = 4
COMMON = {"schedule": "linear", "warmup_steps": 2, "lr": 1e-3}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam", "eps": 1e-4},
    "rmsprop": {"optimizer": "rmsprop", "eps": 1e-3, "alpha": 0.9, "momentum": 0.5},
    "sgd": {"optimizer": "sgd", "lr": 0.1},
    "nesterov": {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True},
}
KINDS = {
    "adam": {"exp_avg", "exp_avg_sq"},
    "rmsprop": {"square_avg", "momentum_buffer"},
    "sgd": set(),
    "nesterov": {"momentum_buffer"},
}
BACKENDS: dict[str, dict[str, Any]] = {
    "torch": {"backend": "torch"},
    "fsdp": {"backend": "fsdp"},
    **{f"zero{stage}": {"backend": "deepspeed", "zero_stage": stage} for stage in range(4)},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model") / "policy")


def step_batch(step: int) -> Batch:
    return random_batch(8, seed=200 + step)


def learn(trainer: Trainer, steps: range) -> list[dict[str, float]]:
    """Metrics of each step; every rank takes every other row."""
    results = []
    for step in steps:
        batch = step_batch(step)
        rows = range(trainer.spec.rank, len(batch), trainer.spec.world_size)
        results.append(trainer.step([batch.index(list(rows)).trim()], TokenLoss(tokens_of(batch))).values())
    return results


def case(rank: int, world_size: int, source: str, options: dict[str, Any]) -> dict[str, Any]:
    trainer = build_trainer(trainer_spec(Path(source), rank=rank, world_size=world_size, **options))
    metrics = learn(trainer, range(2))
    middle = {"weights": trainer.weights(), "state": trainer.optimizer_state()}
    metrics += learn(trainer, range(2, STEPS))
    return {"metrics": metrics, "middle": middle, "weights": trainer.weights(), "state": trainer.optimizer_state()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_ranks_follow_the_definition(name: str, backend: str, two: Ranks, source: Path) -> None:
    options = {**COMMON, **OPTIMIZERS[name]}
    batches = [step_batch(step) for step in range(STEPS)]
    reference: Reference = train_in_one_go(source, batches, trainer_spec(source, **options))
    first, _ = two.run(case, str(source), {**BACKENDS[backend], **options})
    for found, wanted in zip(first["metrics"], reference.metrics, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    assert gap(first["weights"], reference.weights) < 1e-5
    assert {key.split("/")[1] for key in first["state"] if "/" in key} == KINDS[name]

    alone = build_trainer(trainer_spec(source, backend="torch", **options))
    alone.load_weights(first["middle"]["weights"])
    alone.load_optimizer_state(first["middle"]["state"])
    assert_equal(alone.optimizer_state(), first["middle"]["state"])
    learn(alone, range(2, STEPS))
    assert gap(alone.weights(), first["weights"]) < 1e-5
    if KINDS[name]:
        assert gap(alone.optimizer_state(), first["state"]) < 1e-4


def test_an_engine_bound_to_one_optimiser_refuses_another(source: Path) -> None:
    """Its caller builds another trainer; going on with the moments of the first would be silently wrong."""
    trainer = build_trainer(trainer_spec(source, backend="deepspeed", zero_stage=1))
    with pytest.raises(HybridFlowError, match="adamw was given sgd"):
        trainer.reset_optimizer(OptimizerConfig(optimizer="sgd"), 5)
