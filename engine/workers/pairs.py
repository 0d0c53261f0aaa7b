"""Pairs of completions as a batch: two rows after each other, the chosen one first; never split over ranks or parts."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.batch import Batch
from engine.controller.dispatch import Transfer
from engine.controller.mesh import Mesh
from engine.errors import ShapeError


def pair_parts(batch: Batch, max_tokens: int) -> Iterator[Batch]:
    """Micro-batches of whole pairs, at most max_tokens tokens each (padding included); a longer pair is one of its own."""
    longest = batch.lengths().view(-1, 2).max(dim=1).values
    order = torch.argsort(longest, descending=True, stable=True).tolist()
    start = 0
    while start < len(order):
        size = max(max_tokens // (2 * max(int(longest[order[start]]), 1)), 1)
        yield batch.index(_rows_of(order[start : start + size])).trim()
        start += size


def chosen_and_rejected(values: Tensor) -> tuple[Tensor, Tensor]:
    """[2 pairs, ...] -> the rows of the chosen and of the rejected completions."""
    return values[0::2], values[1::2]


def last_tokens(output: Tensor, part: Batch) -> Tensor:
    """[b]: the output [b, T] at the last real token of every row, by its recorded length."""
    return output.gather(1, (part.lengths() - 1)[:, None]).squeeze(1)


def _rows_of(pairs: Sequence[int]) -> list[int]:
    return [row for pair in pairs for row in (2 * pair, 2 * pair + 1)]


def _to_data_groups(argument: Any, mesh: Mesh) -> Sequence[Any]:
    if not isinstance(argument, Batch):
        return [argument] * mesh.size
    if len(argument) % 2:
        raise ShapeError(f"pairs were asked for; the batch has {len(argument)} rows.")
    pairs = range(len(argument) // 2)
    shares = [
        argument.index(torch.tensor(_rows_of(pairs[group :: mesh.data]), dtype=torch.int64))
        for group in range(mesh.data)
    ]
    return [shares[mesh.data_group(rank)] for rank in range(mesh.size)]


# Pairs dealt out in turn to the data groups; rank 0 has the answer that the ranks have combined themselves.
PAIRS_TO_FIRST = Transfer("PAIRS_TO_FIRST", _to_data_groups, lambda results: results[0], lambda mesh: (0,))
