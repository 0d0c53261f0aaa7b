"""Ragged random batches in float64, and the way from a padded tensor back to Python lists, one list per row."""

import torch
from torch import Tensor

LENGTHS = (5, 1, 0, 7, 3, 6)
WIDTH = 8


def masks(lengths: tuple[int, ...] = LENGTHS, width: int = WIDTH) -> Tensor:
    """[B, R] bool; the row of length 7 has a hole, as left by tool text."""
    mask = torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]
    mask[[row for row, length in enumerate(lengths) if length == 7], 2:4] = False
    return mask


def random(mask: Tensor, seed: int, scale: float = 1.0, outside: float = float("nan")) -> Tensor:
    """Normal numbers inside the mask, garbage outside: no result may depend on it."""
    x = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    return torch.where(mask, x, torch.full_like(x, outside))


def logprobs(mask: Tensor, seed: int) -> Tensor:
    return -random(mask, seed).abs() - 0.1


def rows(x: Tensor, mask: Tensor) -> list[list[float]]:
    """The True entries of each row, in order."""
    return [x[row][mask[row]].tolist() for row in range(len(x))]


def padded(values: list[list[float]], mask: Tensor) -> Tensor:
    """The inverse of rows: lists back at the True entries, 0 elsewhere."""
    x = torch.zeros(mask.shape, dtype=torch.float64)
    for row, entries in enumerate(values):
        x[row][mask[row]] = torch.tensor(entries, dtype=torch.float64)
    return x


def close(found: Tensor, expected: Tensor | float, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(
        found, torch.as_tensor(expected, dtype=torch.float64), rtol=tolerance, atol=tolerance, check_dtype=True
    )
