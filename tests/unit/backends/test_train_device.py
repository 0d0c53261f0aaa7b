"""Choices that depend on the device, and a trainer's place in its process group."""

from pathlib import Path

import pytest
import torch

from engine.backends.device import attention_kernel, collective_backend, parameter_dtype
from engine.backends.ranks import require_group
from engine.errors import HybridFlowError
from tests.helpers.training import trainer_spec

CPU = torch.device("cpu")


def test_a_cpu_gets_gloo_torch_attention_and_both_types() -> None:
    assert collective_backend(CPU) == "gloo"
    assert attention_kernel(CPU, torch.bfloat16) == "sdpa"
    assert parameter_dtype("bfloat16", CPU) == torch.bfloat16
    assert parameter_dtype("float32", CPU) == torch.float32


def test_a_rank_whose_group_is_missing_or_another_is_refused() -> None:
    with pytest.raises(HybridFlowError, match="rank"):
        require_group(trainer_spec(Path("unused"), rank=1, world_size=2))
