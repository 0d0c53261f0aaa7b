"""The same training on a CUDA device: plain torch, FSDP and DeepSpeed ZeRO 0 to 3 against the reference on the CPU."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.trainers import build_trainer
from tests.helpers.reference_training import train_in_one_go
from tests.helpers.training import TokenLoss, model_folder, random_batch, tokens_of, trainer_spec

BACKENDS = [
    {"backend": "torch"},
    {"backend": "fsdp"},
    *({"backend": "deepspeed", "zero_stage": stage} for stage in range(4)),
]
OPTIONS = {"eps": 1e-4, "schedule": "linear"}


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("backend", BACKENDS, ids=["torch", "fsdp", "zero0", "zero1", "zero2", "zero3"])
def test_losses_and_norms_equal_the_cpu_reference(
    backend: dict[str, Any], dtype: str, bound: float, tmp_path: Path
) -> None:
    source = model_folder(tmp_path / "policy")
    batches = [random_batch(6, seed=step) for step in range(3)]
    reference = train_in_one_go(source, batches, trainer_spec(source, **OPTIONS))
    spec = trainer_spec(source, dtype=dtype, **backend, **OPTIONS)
    trainer = build_trainer(dataclasses.replace(spec, device=torch.device("cuda", 0)))
    for batch, wanted in zip(batches, reference.metrics, strict=True):
        found = trainer.step(batch.split([2, 4]), TokenLoss(tokens_of(batch))).values()
        assert found == pytest.approx(wanted, rel=bound)
    assert {tensor.device.type for tensor in trainer.weights().values()} == {"cpu"}
