"""What a GPU says of itself: memory that was really taken, a rate for known names, a size for the dry run."""

import math

import torch

from engine.backends.device import collective_backend, gpu_bytes, gpu_indices, peak_memory, peak_rate, pick_device


def test_peak_memory_counts_what_was_freed_again() -> None:
    device = pick_device()
    before = peak_memory(device)
    held = torch.empty(torch.cuda.memory_allocated(device) + before + 2**26, dtype=torch.uint8, device=device)
    size = held.numel()
    del held
    assert peak_memory(device) >= size


def test_the_first_gpu_is_used_and_has_a_size() -> None:
    assert pick_device() == torch.device("cuda", 0) and 0 in gpu_indices()
    assert collective_backend(pick_device()) == "cpu:gloo,cuda:nccl"
    assert gpu_bytes() == torch.cuda.get_device_properties(0).total_memory


def test_the_rate_is_that_of_a_data_sheet_or_not_known() -> None:
    rate = peak_rate("bfloat16", pick_device())
    assert math.isnan(rate) or rate > 1e13
