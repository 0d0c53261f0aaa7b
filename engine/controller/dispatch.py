"""Transfer protocols: how a call's arguments are spread over ranks and how results come back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from engine.batch import Batch, concat
from engine.metrics import Metrics, merge

Arguments = tuple[Any, ...]
Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Transfer:
    """A protocol: spread(arguments, ranks) gives the arguments of every rank; collect(arguments, results) undoes it."""

    name: str
    spread: Callable[[Arguments, int], list[Arguments]]
    collect: Callable[[Arguments, Sequence[Any]], Any]


def dispatch(transfer: Transfer, *, reads: Sequence[str] = ()) -> Callable[[Method], Method]:
    """Declare a worker method's protocol and the batch fields and columns it reads (all, if none is named)."""

    def mark(method: Method) -> Method:
        method.transfer = transfer  # type: ignore[attr-defined]
        method.reads = tuple(reads)  # type: ignore[attr-defined]
        return method

    return mark


def prepare(method: Callable[..., Any], arguments: Arguments) -> Arguments:
    """Arguments with every batch cut down to what the method reads."""
    reads: tuple[str, ...] = method.reads  # type: ignore[attr-defined]
    return tuple(value.select(reads) if reads and isinstance(value, Batch) else value for value in arguments)


def data_parallel_rows(batch: Batch, ranks: int) -> list[torch.Tensor]:
    """Rows of every rank: dealt out in turn within each mini-batch, so that every optimiser step is balanced."""
    order = torch.argsort(batch.mini_batch, stable=True) if "mini_batch" in batch else torch.arange(len(batch))
    return [order[rank::ranks] for rank in range(ranks)]


def _spread_batch(arguments: Arguments, ranks: int) -> list[Arguments]:
    spread = [
        [value.index(rows) for rows in data_parallel_rows(value, ranks)]
        if isinstance(value, Batch)
        else [value] * ranks
        for value in arguments
    ]
    return [tuple(parts[rank] for parts in spread) for rank in range(ranks)]


def _collect_batch(arguments: Arguments, results: Sequence[Any]) -> Any:
    if isinstance(results[0], Metrics):
        return merge(results)
    if not isinstance(results[0], Batch):
        return list(results)
    batch = next(value for value in arguments if isinstance(value, Batch))
    rows = torch.cat(data_parallel_rows(batch, len(results)))
    return concat(results).index(torch.argsort(rows))


def _first(arguments: Arguments, results: Sequence[Any]) -> Any:
    return results[0]


def _same(arguments: Arguments, ranks: int) -> list[Arguments]:
    return [arguments] * ranks


ONE_TO_ALL = Transfer("ONE_TO_ALL", _same, lambda arguments, results: list(results))
ONE_TO_FIRST = Transfer("ONE_TO_FIRST", _same, _first)  # every rank works, rank 0 has the answer
DP = Transfer("DP", _spread_batch, _collect_batch)
DP_TO_FIRST = Transfer("DP_TO_FIRST", _spread_batch, _first)  # the ranks combine their result themselves
