"""Two and four ranks, with layers cut over tensor-parallel ranks or not, do what one process does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.base import Trainer
from engine.backends.trainers import build_trainer
from engine.batch import Batch
from engine.config import LoraConfig
from engine.errors import ConfigError, ShapeError
from tests.helpers.processes import Ranks
from tests.helpers.reference_training import Reference, train_in_one_go
from tests.helpers.tensors import assert_equal, gap
from tests.helpers.training import TokenLoss, model_folder, random_batch, response_logprobs, tokens_of, trainer_spec

STEPS = 5
OPTIONS = {"lr": 1e-3, "schedule": "linear", "warmup_steps": 2, "eps": 1e-4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
CUTS = [([6], [6]), ([2, 3], [1, 2, 4]), ([], [5, 7]), ([12], []), ([1, 1, 1, 1, 1], [7])]
BACKENDS = ["torch", "fsdp"]
FOUR: dict[str, dict[str, Any]] = {
    "torch": {"backend": "torch"},
    "torch-cut": {"backend": "torch", "tensor_parallel": 2},
    "fsdp": {"backend": "fsdp"},
    "fsdp-cut": {"backend": "fsdp", "tensor_parallel": 2},
    **{f"zero{stage}": {"backend": "deepspeed", "zero_stage": stage} for stage in range(4)},
    "zero2-offload": {"backend": "deepspeed", "zero_stage": 2, "offload_optimizer": True},
    "zero3-offload": {"backend": "deepspeed", "zero_stage": 3, "offload_optimizer": True},
}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    group = Ranks(4, tmp_path_factory.mktemp("ranks") / "rendezvous")
    yield group
    group.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model") / "policy", tied=True, heads=HEADS)


@pytest.fixture(scope="module")
def reference(source: Path) -> Reference:
    return train_in_one_go(source, [step_batch(step) for step in range(STEPS)], trainer_spec(source, **OPTIONS))


def step_batch(step: int) -> Batch:
    return random_batch(12, seed=100 + step)


def learn(trainer: Trainer, steps: range) -> list[dict[str, float]]:
    """Metrics of each step; data rank d takes share d of the step's micro-batches, all of them if it is alone."""
    tensor = trainer.spec.train.tensor_parallel
    copies, mine = trainer.spec.world_size // tensor, trainer.spec.rank // tensor
    results = []
    for step in steps:
        batch = step_batch(step)
        shares = [[*CUTS[step][0], *CUTS[step][1]]] if copies == 1 else list(CUTS[step])
        parts = batch.split([size for share in shares for size in share])
        if mine < len(shares):
            start = sum(len(share) for share in shares[:mine])
            parts = parts[start : start + len(shares[mine])]
        else:
            parts = []  # more copies than shares: some learn from nothing
        results.append(trainer.step([part.trim() for part in parts], TokenLoss(tokens_of(batch))).values())
    return results


def case(rank: int, world_size: int, source: str, options: dict[str, Any]) -> dict[str, Any]:
    """Five steps, scores, and the last three steps again from a snapshot."""
    spec = trainer_spec(Path(source), rank=rank, world_size=world_size, **options)
    trainer = build_trainer(spec)
    metrics = learn(trainer, range(2))
    saved = [trainer.weights(), trainer.optimizer_state()]
    torch.distributed.broadcast_object_list(saved, src=0)
    metrics += learn(trainer, range(2, STEPS))
    again = build_trainer(spec)
    again.load_weights(saved[0])
    again.load_optimizer_state(saved[1])
    return {
        "metrics": metrics,
        "repeated": learn(again, range(2, STEPS)),
        "weights": trainer.weights(),
        "state": trainer.optimizer_state(),
        "saved": saved,
        "scores": trainer.score(step_batch(9).split([5, 7]), response_logprobs),
    }


def check_against(reference: Reference, results: list[dict[str, Any]]) -> None:
    first = results[0]
    for result in results:
        assert result["metrics"] == first["metrics"]
        torch.testing.assert_close(torch.cat(result["scores"]), reference.score(step_batch(9)), rtol=1e-4, atol=1e-4)
    for found, wanted in zip(first["metrics"], reference.metrics, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    assert gap(first["weights"], reference.weights) < 1e-5
    assert first["repeated"] == first["metrics"][2:]


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_tensor_parallel_ranks_equal_one_process(
    backend: str, two: Ranks, source: Path, reference: Reference
) -> None:
    results = two.run(case, str(source), {"backend": backend, "tensor_parallel": 2, **OPTIONS})
    check_against(reference, results)


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_equal_one_process(name: str, four: Ranks, source: Path, reference: Reference) -> None:
    """Two copies of two ranks, or four of one, of which two have no rows. One process goes on from their snapshot."""
    results = four.run(case, str(source), {**FOUR[name], **OPTIONS})
    check_against(reference, results)
    alone = build_trainer(trainer_spec(source, **OPTIONS, backend="torch"))
    alone.load_weights(results[0]["saved"][0])
    alone.load_optimizer_state(results[0]["saved"][1])
    assert_equal(alone.weights(), results[0]["saved"][0])
    assert_equal(alone.optimizer_state(), results[0]["saved"][1])
    learn(alone, range(2, STEPS))
    assert gap(alone.weights(), results[0]["weights"]) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_tensor_parallel_ranks_in_bfloat16(backend: str, two: Ranks, source: Path, reference: Reference) -> None:
    options = {"dtype": "bfloat16", "gradient_checkpointing": True, **OPTIONS}
    first, _ = two.run(case, str(source), {"backend": backend, "tensor_parallel": 2, **options})
    for found, wanted in zip(first["metrics"], reference.metrics, strict=True):
        assert found["policy/nll"] == pytest.approx(wanted["policy/nll"], rel=1e-2)
        assert found["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=3e-2)
    assert first["repeated"] == first["metrics"][2:]
    for name, weight in first["weights"].items():
        assert torch.equal(weight, first["state"][f"{name}/master"].bfloat16())


def norms_case(rank: int, world_size: int, source: str, options: dict[str, Any]) -> dict[str, Any]:
    trainer = build_trainer(trainer_spec(Path(source), rank=rank, world_size=world_size, **options))
    return {"metrics": learn(trainer, range(2)), "weights": trainer.weights(), "state": trainer.optimizer_state()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_norms_of_single_heads_get_the_gradient_of_all_heads(backend: str, two: Ranks, tmp_path: Path) -> None:
    """Qwen3 normalises queries and keys with weights that every rank holds whole and sees only its own heads use."""
    source = tmp_path / "qwen"
    source.mkdir()
    (source / "config.json").write_text(QWEN3)
    options = {"init": "random", **OPTIONS}
    cut, _ = two.run(norms_case, str(source), {"backend": backend, "tensor_parallel": 2, **options})
    whole = norms_case(0, 1, str(source), {"backend": "torch", **options})
    for found, wanted in zip(cut["metrics"], whole["metrics"], strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    assert gap(cut["weights"], whole["weights"]) < 1e-5
    assert gap(cut["state"], whole["state"]) < 1e-4


QWEN3 = """{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 100, "hidden_size": 64,
"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}"""


def other_rows_case(rank: int, world_size: int, source: str) -> None:
    spec = trainer_spec(Path(source), rank=rank, world_size=world_size, backend="torch", tensor_parallel=2)
    trainer = build_trainer(spec)
    with pytest.raises(ShapeError, match="different rows"):
        trainer.score([step_batch(rank)], response_logprobs)


def test_other_rows_on_one_copy_of_the_model_are_refused(two: Ranks, source: Path) -> None:
    two.run(other_rows_case, str(source))


def refused_case(rank: int, world_size: int, source: str) -> str:
    spec = trainer_spec(Path(source), rank=rank, world_size=world_size, backend="torch", tensor_parallel=2)
    with pytest.raises(ConfigError) as caught:
        build_trainer(spec)
    return str(caught.value)


def test_heads_that_do_not_divide_are_refused(two: Ranks, tmp_path: Path) -> None:
    """The tiny model has one key-value head."""
    messages = two.run(refused_case, str(model_folder(tmp_path / "policy")))
    assert "train.tensor_parallel = 2: does not divide num_key_value_heads = 1" in messages[0]


def adapter_case(rank: int, world_size: int, source: str, options: dict[str, Any]) -> dict[str, Any]:
    lora = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "down_proj"))
    spec = trainer_spec(Path(source), rank=rank, world_size=world_size, lora=lora, **options)
    trainer = build_trainer(spec)
    metrics = learn(trainer, range(2))
    return {"metrics": metrics, "weights": trainer.weights(), "state": trainer.optimizer_state()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks_train_the_adapter_of_one_process(backend: str, two: Ranks, source: Path) -> None:
    first, second = two.run(adapter_case, str(source), {"backend": backend, **OPTIONS})
    alone = adapter_case(0, 1, str(source), {"backend": "torch", **OPTIONS})
    for found, wanted in zip(first["metrics"], alone["metrics"], strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    assert gap(first["weights"], alone["weights"]) < 1e-5
    assert gap(first["state"], alone["state"]) < 1e-4
    assert second["weights"] == second["state"] == {}
