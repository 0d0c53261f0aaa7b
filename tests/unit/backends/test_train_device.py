"""Choices that depend on the device, and a trainer's place in its process group."""

import math
from pathlib import Path

import pytest
import torch

from engine.backends.device import (
    attention_kernel,
    collective_backend,
    listed_rate,
    parameter_dtype,
    peak_memory,
    peak_rate,
)
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


@pytest.mark.parametrize(
    ("name", "bfloat16", "float32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA H200", 989e12, 67e12),
        ("NVIDIA H200 NVL", 835e12, 60e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA L4", 121e12, 30.3e12),
    ],
)
def test_known_gpus_have_the_rate_of_their_data_sheet(name: str, bfloat16: float, float32: float) -> None:
    assert (listed_rate(name, "bfloat16"), listed_rate(name, "float32")) == (bfloat16, float32)


@pytest.mark.parametrize("name", ["NVIDIA GeForce GTX 1080", "Tesla V100-SXM2-16GB", "NVIDIA GH200 480GB"])
def test_the_rate_of_an_unknown_gpu_is_nan(name: str) -> None:
    assert math.isnan(listed_rate(name, "bfloat16"))


def test_the_rate_of_a_cpu_is_measured_once() -> None:
    first = peak_rate("float32", CPU)
    assert 1e8 < first < 1e14 and peak_rate("float32", CPU) == first


def test_peak_memory_of_a_cpu_process_never_falls() -> None:
    before = peak_memory(CPU)
    held = torch.ones(64 * 2**20 // 4)
    after = peak_memory(CPU)
    del held
    assert 2**20 < before <= after <= peak_memory(CPU)
