"""Plain torch and DeepSpeed ZeRO 0 to 3 on two gloo processes do what one process with one batch does."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.base import Trainer
from engine.backends.trainers import build_trainer
from engine.batch import Batch
from engine.config import OptimizerConfig
from engine.errors import DivergedError
from tests.helpers.processes import Ranks
from tests.helpers.reference_training import Reference, train_in_one_go
from tests.helpers.tensors import assert_equal, gap
from tests.helpers.training import (
    TokenLoss,
    ValueLoss,
    model_folder,
    poisoned,
    random_batch,
    response_logprobs,
    tokens_of,
    trainer_spec,
)

STEPS = 5
TORCH = {"backend": "torch"}
FSDP = {"backend": "fsdp"}
BACKENDS = [TORCH, FSDP, *({"backend": "deepspeed", "zero_stage": stage} for stage in range(4))]
NAMES = ["torch", "fsdp", "zero0", "zero1", "zero2", "zero3"]
# A large eps keeps AdamW from blowing up rounding of gradients that are almost zero.
OPTIONS = {"lr": 1e-3, "schedule": "linear", "warmup_steps": 2, "eps": 1e-4}

# Micro-batches of rank 0 and rank 1 in each step, in rows of one batch of 12; a rank may have none.
CUTS = [([6], [6]), ([2, 3], [1, 2, 4]), ([], [5, 7]), ([12], []), ([1, 1, 1, 1, 1], [7])]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model") / "policy")


@pytest.fixture(scope="module")
def tied_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model") / "tied", tied=True)


@pytest.fixture(scope="module")
def reference(source: Path) -> Reference:
    return train_in_one_go(source, [step_batch(step) for step in range(STEPS)], trainer_spec(source, **OPTIONS))


@pytest.fixture(scope="module")
def tied_reference(tied_source: Path) -> Reference:
    return train_in_one_go(
        tied_source, [step_batch(step) for step in range(STEPS)], trainer_spec(tied_source, **OPTIONS)
    )


def step_batch(step: int) -> Batch:
    return random_batch(12, seed=100 + step)


def learn(trainer: Trainer, steps: range, head: str = "lm") -> list[dict[str, float]]:
    """Metrics of each step; every rank takes its own micro-batches of the step's batch."""
    results = []
    for step in steps:
        batch = step_batch(step)
        mine, theirs = CUTS[step][0], CUTS[step][1]
        parts = batch.split([*mine, *theirs])
        if trainer.spec.world_size == 2:
            parts = parts[: len(mine)] if trainer.spec.rank == 0 else parts[len(mine) :]
        loss = (TokenLoss if head == "lm" else ValueLoss)(tokens_of(batch))
        results.append(trainer.step([part.trim() for part in parts], loss).values())
    return results


def full_case(rank: int, world_size: int, source: str, options: dict[str, Any]) -> dict[str, Any]:
    """One backend through everything: a refused step, five steps, scores, and the same again from a snapshot."""
    spec = trainer_spec(Path(source), rank=rank, world_size=world_size, **options)
    trainer = build_trainer(spec)
    before = trainer.weights()
    with pytest.raises(DivergedError, match="gradient norm"):
        trainer.step([step_batch(0)] * rank, poisoned)
    untouched = trainer.weights()
    metrics = learn(trainer, range(2))
    weights, state = trainer.weights(), trainer.optimizer_state()
    everyone = [weights, state]
    torch.distributed.broadcast_object_list(everyone, src=0)
    metrics += learn(trainer, range(2, STEPS))

    again = build_trainer(spec)
    again.load_weights(everyone[0])
    again.load_optimizer_state(everyone[1])
    repeated = learn(again, range(2, STEPS))
    parts = step_batch(9).split([2, 3, 7])
    scores = trainer.score(parts[:1] if rank else parts[1:], response_logprobs)
    return {
        "before": before,
        "untouched": untouched,
        "metrics": metrics,
        "repeated": repeated,
        "steps": (trainer.steps, again.steps),
        "weights": trainer.weights(),
        "repeated_weights": again.weights(),
        "state": trainer.optimizer_state(),
        "repeated_state": again.optimizer_state(),
        "scores": scores,
    }


@pytest.mark.parametrize("backend", BACKENDS, ids=NAMES)
def test_two_ranks_in_float32_equal_one_process(
    backend: dict[str, Any], two: Ranks, tied_source: Path, tied_reference: Reference
) -> None:
    """Unequal micro-batches, embeddings tied to the head, and a refused step before the first."""
    first, second = two.run(full_case, str(tied_source), {**backend, **OPTIONS})
    assert_equal(first["untouched"], first["before"])
    assert first["metrics"] == second["metrics"]
    for found, wanted in zip(first["metrics"], tied_reference.metrics, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    assert gap(first["weights"], tied_reference.weights) < 1e-5
    assert first["steps"] == second["steps"] == (STEPS, STEPS)
    assert second["weights"] == second["state"] == {}

    assert first["repeated"] == first["metrics"][2:]
    assert_equal(first["repeated_weights"], first["weights"])
    assert_equal(first["repeated_state"], first["state"])
    assert [tensor.shape[0] for tensor in first["scores"]] == [3, 7]
    assert [tensor.shape[0] for tensor in second["scores"]] == [2]
    torch.testing.assert_close(
        torch.cat([*second["scores"], *first["scores"]]), tied_reference.score(step_batch(9)), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("backend", BACKENDS, ids=NAMES)
def test_two_ranks_in_bfloat16_learn_on_float32_masters(
    backend: dict[str, Any], two: Ranks, source: Path, reference: Reference
) -> None:
    """bfloat16 has 3 digits and the stages round at different places: bounds are 1 % of loss and 3 % of the norm."""
    options = {**backend, **OPTIONS, "dtype": "bfloat16", "gradient_checkpointing": True}
    first, _ = two.run(full_case, str(source), options)
    assert_equal(first["untouched"], first["before"])
    for found, wanted in zip(first["metrics"], reference.metrics, strict=True):
        assert found["policy/nll"] == pytest.approx(wanted["policy/nll"], rel=1e-2)
        assert found["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=3e-2)
    assert first["repeated"] == first["metrics"][2:]
    assert_equal(first["repeated_weights"], first["weights"])
    assert_equal(first["repeated_state"], first["state"])
    for name, weight in first["weights"].items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, first["state"][f"{name}/master"].bfloat16())


def start_case(rank: int, world_size: int, source: str, options: dict[str, Any]) -> dict[str, Any]:
    """Two steps; weights and optimiser state of a critic."""
    trainer = build_trainer(trainer_spec(Path(source), rank=rank, world_size=world_size, head="value", **options))
    learn(trainer, range(2), "value")
    return {"weights": trainer.weights(), "state": trainer.optimizer_state()}


def continue_case(rank: int, world_size: int, source: str, options: dict[str, Any], saved: dict[str, Any]) -> Any:
    """Three more steps from a snapshot that another layout made."""
    trainer = build_trainer(trainer_spec(Path(source), rank=rank, world_size=world_size, head="value", **options))
    trainer.load_weights(saved["weights"])
    trainer.load_optimizer_state(saved["state"])
    reread = {"weights": trainer.weights(), "state": trainer.optimizer_state()}
    learn(trainer, range(2, STEPS), "value")
    return {"reread": reread, "weights": trainer.weights(), "state": trainer.optimizer_state()}


def test_a_snapshot_of_two_ranks_continues_on_any_layout(two: Ranks, source: Path) -> None:
    """ZeRO 2 on two ranks stops, all others go on; the head's bias is one number and cannot be divided."""
    saved = two.run(start_case, str(source), {"zero_stage": 2, **OPTIONS})[0]
    results = [continue_case(0, 1, str(source), {**backend, **OPTIONS}, saved) for backend in BACKENDS]
    results += [two.run(continue_case, str(source), {**backend, **OPTIONS}, saved)[0] for backend in BACKENDS[2:]]
    for result in results:
        assert_equal(result["reread"]["weights"], saved["weights"])
        assert_equal(result["reread"]["state"], saved["state"])
        assert gap(result["weights"], results[0]["weights"]) < 1e-6
        assert gap(result["state"], results[0]["state"]) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS, ids=NAMES)
def test_a_reset_forgets_moments_steps_options_and_schedule(backend: dict[str, Any], source: Path) -> None:
    """After it, training goes on as if these weights had been loaded into a new trainer with the new options."""
    second_stage = {"lr": 5e-4, "betas": (0.8, 0.9), "max_grad_norm": 0.1, "warmup_steps": 2, "weight_decay": 0.3}
    reset = build_trainer(trainer_spec(source, **backend, **OPTIONS))
    learn(reset, range(2))
    fresh = build_trainer(trainer_spec(source, total_steps=10, **backend, **second_stage))
    fresh.load_weights(reset.weights())
    reset.reset_optimizer(OptimizerConfig(**second_stage), 10)
    assert reset.steps == 0
    assert learn(reset, range(2)) == learn(fresh, range(2))
    assert_equal(reset.weights(), fresh.weights())
    assert_equal(reset.optimizer_state(), fresh.optimizer_state())


def frozen_case(rank: int, world_size: int, source: str, backend: dict[str, Any]) -> list[Tensor]:
    """Scores of a reference model; the second rank has nothing to score."""
    spec = trainer_spec(Path(source), rank=rank, world_size=world_size, frozen=True, **backend)
    return build_trainer(spec).score(step_batch(0).split([4, 8]) if rank == 0 else [], response_logprobs)


def test_a_frozen_model_scores_the_same_spread_or_whole(two: Ranks, source: Path) -> None:
    spread, idle = two.run(frozen_case, str(source), BACKENDS[5])
    whole = build_trainer(trainer_spec(source, frozen=True)).score([step_batch(0)], response_logprobs)
    assert idle == []
    torch.testing.assert_close(torch.cat(spread), whole[0], rtol=1e-5, atol=1e-5)


SCRIPT = """
import sys
from pathlib import Path
from tests.helpers.training import TokenLoss, random_batch, tokens_of, trainer_spec
from engine.backends.trainers import build_trainer
trainer = build_trainer(trainer_spec(Path(sys.argv[1]), zero_stage=1, dtype="bfloat16"))
batch = random_batch(2)
trainer.step([batch], TokenLoss(tokens_of(batch)))
print("mlflow" in sys.modules)
"""


def test_standard_output_stays_clean_and_nothing_is_compiled(source: Path, tmp_path: Path) -> None:
    """ZeRO 1 in bfloat16 is the most talkative engine."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(source)],
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path / "compiled")},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    assert not (tmp_path / "compiled").exists()
    assert "MA " not in done.stderr and "WARNING" not in done.stderr
