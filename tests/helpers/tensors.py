"""Comparisons of named sets of tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor


def gap(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """Largest difference of two sets of tensors, relative to the largest value of the tensor."""
    assert left.keys() == right.keys()
    gaps = [(left[k].float() - right[k].float()).abs().max() / right[k].abs().max().clamp(min=1e-12) for k in left]
    return float(max(gaps))


def assert_equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    """Same names, same types, same values, bit for bit."""
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
