"""Counter-based randomness: every seed is a hash of what it is for, so nothing random has to be saved or restored."""

import hashlib

import torch
from torch import Tensor


def derive(*parts: int | str) -> int:
    """A seed in [0, 2**63) from the run seed and its purpose, for instance derive(seed, "sample", position)."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def permutation(size: int, *parts: int | str) -> Tensor:
    """[size] int64: the order that belongs to these parts."""
    generator = torch.Generator().manual_seed(derive("permutation", *parts))
    return torch.randperm(size, generator=generator)


def stream_rows(size: int, batch: int, step: int, *parts: int | str) -> list[int]:
    """Rows of step `step` (from 0) of an endless stream of epochs, each a permutation of `size` rows.

    A batch may span two epochs; no row is dropped and none comes twice within an epoch.
    """
    rows: list[int] = []
    position = step * batch
    while len(rows) < batch:
        epoch, offset = divmod(position, size)
        taken = permutation(size, *parts, epoch)[offset : offset + batch - len(rows)].tolist()
        rows.extend(taken)
        position += len(taken)
    return rows
