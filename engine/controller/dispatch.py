"""Transfer protocols: what a call sends to every rank and how its results come together (HybridFlow paper, table 3)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from engine.batch import Batch, concat
from engine.controller.mesh import Mesh
from engine.errors import ShapeError
from engine.metrics import Metrics, merge

Arguments = tuple[Any, ...]
Method = TypeVar("Method", bound=Callable[..., Any])
# What padding rows hold in the fields that decide what a row adds to a loss, a mean or a count.
_SILENT: dict[str, float] = {"response_mask": False, "response_lengths": 0, "scores": torch.nan, "costs": torch.nan}


def all_ranks(mesh: Mesh) -> Sequence[int]:
    """Every rank has a part of the answer."""
    return range(mesh.size)


@dataclass(frozen=True)
class Transfer:
    """A protocol; a new one is another instance with its own pair of functions.

    spread(argument, mesh): what each rank is sent of one argument, in rank order; the same object for several ranks
    travels once. collect(results): one value from the results of the ranks `sources(mesh)`, in that order.
    """

    name: str
    spread: Callable[[Any, Mesh], Sequence[Any]]
    collect: Callable[[Sequence[Any]], Any]
    sources: Callable[[Mesh], Sequence[int]] = all_ranks


@dataclass(frozen=True)
class Padded:
    """A rank's share of a batch with `rows` real rows, followed by padding."""

    batch: Batch
    rows: int


def dispatch(transfer: Transfer, *, reads: Sequence[str] = (), streams: bool = False) -> Callable[[Method], Method]:
    """Declare a worker method's protocol and the batch fields and columns it reads (all, if none is named).

    streams: of a DP method; in place of a batch it also takes engine.controller.stream.Arriving.
    """

    def mark(method: Method) -> Method:
        method.transfer = transfer  # type: ignore[attr-defined]
        method.reads = tuple(reads)  # type: ignore[attr-defined]
        method.streams = streams  # type: ignore[attr-defined]
        return method

    return mark


def shares(method: Callable[..., Any], argument: Any, mesh: Mesh) -> Sequence[Any]:
    """What each rank is sent of one argument of a declared method; batches are cut down to what the method reads."""
    transfer: Transfer = method.transfer  # type: ignore[attr-defined]
    reads: tuple[str, ...] = method.reads  # type: ignore[attr-defined]
    parts = transfer.spread(argument.select(reads) if reads and isinstance(argument, Batch) else argument, mesh)
    if len(parts) != mesh.size:
        raise ShapeError(
            f"{transfer.name} gave {len(parts)} shares of an argument for the {mesh.size} ranks of {mesh}."
        )
    return parts


def perform(method: Callable[..., Any], arguments: Arguments) -> Any:
    """The result of one rank's share of a call; rows that padding added to a batch do not come back.

    Raises ShapeError if a method returns a batch that has not one row for each that it was given.
    """
    padded = [value for value in arguments if isinstance(value, Padded)]
    result = method(*(value.batch if isinstance(value, Padded) else value for value in arguments))
    if not padded or not isinstance(result, Batch):
        return result
    if len(result) != len(padded[0].batch):
        raise ShapeError(f"{method.__name__} returned {len(result)} rows for the {len(padded[0].batch)} it was given.")
    return result.index(torch.arange(padded[0].rows))


def deal(batch: Batch, groups: int) -> list[Batch]:
    """Rows dealt out in turn: group g has the rows g, g + groups, g + 2 groups..., so sizes differ by at most one."""
    return [batch.index(own) for own in _dealt(len(batch), groups)]


def _dealt(rows: int, groups: int) -> list[torch.Tensor]:
    return [torch.arange(rows)[group::groups] for group in range(groups)]


def deal_padded(batch: Batch, groups: int) -> list[Padded]:
    """The same, every group padded to the rows of the largest."""
    rows = -(-len(batch) // groups)
    return [Padded(_padded(batch, own, rows), len(own)) for own in _dealt(len(batch), groups)]


def _padded(batch: Batch, own: torch.Tensor, rows: int) -> Batch:
    """`rows` rows: those in `own`, then copies of the batch's first row that add nothing to losses, means and counts.

    Copies keep their prompt, because a row without any token is one that models cannot score.
    """
    filled = batch.index(torch.cat([own, own.new_zeros(rows - len(own))]))
    silent = {}
    for name, value in _SILENT.items():
        if name in filled:
            silent[name] = filled.fields[name].clone()
            silent[name][len(own) :] = value
    return filled.with_fields(**silent)


def mini_batch_rows(batch: Batch, ranks: int) -> list[torch.Tensor]:
    """Rows of every rank: dealt out in turn within each mini-batch, so that every optimiser step is balanced."""
    order = torch.argsort(batch.mini_batch, stable=True) if "mini_batch" in batch else torch.arange(len(batch))
    return [order[rank::ranks] for rank in range(ranks)]


def join(results: Sequence[Any]) -> Any:
    """Undoes `deal`: batches back in order, metrics combined, a list of anything else."""
    if isinstance(results[0], Metrics):
        return merge(results)
    if not isinstance(results[0], Batch):
        return list(results)
    dealt = _dealt(sum(len(part) for part in results), len(results))
    if [len(part) for part in results] != [len(own) for own in dealt]:
        raise ShapeError(
            f"the groups returned {[len(part) for part in results]} rows; dealt out were {[len(own) for own in dealt]}."
        )
    return concat(results).index(torch.argsort(torch.cat(dealt)))


def _first(results: Sequence[Any]) -> Any:
    return results[0]


def _rank_0(mesh: Mesh) -> Sequence[int]:
    return (0,)


def _same(argument: Any, mesh: Mesh) -> Sequence[Any]:
    return [argument] * mesh.size


def _one_each(argument: Any, mesh: Mesh) -> Sequence[Any]:
    if not isinstance(argument, list | tuple):
        raise ShapeError(f"ALL_TO_ALL takes a list with one entry for each rank; found {type(argument).__name__}.")
    return argument


def _scatter(argument: Any, mesh: Mesh) -> Sequence[Any]:
    return deal(argument, mesh.size) if isinstance(argument, Batch) else _same(argument, mesh)


def _rows_to_data_groups(argument: Any, mesh: Mesh) -> Sequence[Any]:
    if not isinstance(argument, Batch):
        return _same(argument, mesh)
    return _to_groups(deal(argument, mesh.data), mesh)


def _mini_batches_to_data_groups(argument: Any, mesh: Mesh) -> Sequence[Any]:
    if not isinstance(argument, Batch):
        return _same(argument, mesh)
    return _to_groups([argument.index(rows) for rows in mini_batch_rows(argument, mesh.data)], mesh)


def _to_groups(shares: Sequence[Any], mesh: Mesh) -> Sequence[Any]:
    return [shares[mesh.data_group(rank)] for rank in range(mesh.size)]


def _to_data_groups(argument: Any, mesh: Mesh) -> Sequence[Any]:
    if not isinstance(argument, Batch):
        return _same(argument, mesh)
    return _to_groups(deal_padded(argument, mesh.data), mesh)


def _to_replicas(argument: Any, mesh: Mesh) -> Sequence[Any]:
    if not isinstance(argument, Batch):
        return _same(argument, mesh)
    replicas = deal_padded(argument, mesh.replicas)
    return [replicas[mesh.replica(rank)] for rank in range(mesh.size)]


ONE_TO_ALL = Transfer("ONE_TO_ALL", _same, list)
ALL_TO_ALL = Transfer("ALL_TO_ALL", _one_each, list)
DP = Transfer("DP", _scatter, join)
THREE_D = Transfer("3D", _to_data_groups, join, Mesh.group_outputs)
THREE_D_ALL_MICRO_DP = Transfer("3D_ALL_MICRO_DP", _to_replicas, join, Mesh.replica_heads)
THREE_D_PP_ONLY = Transfer("3D_PP_ONLY", _same, list, Mesh.stage_heads)
# Three of our own. ROWS is 3D without padding, for methods that take any number of rows, none included. In the others every
# rank works, and rank 0 has the answer that the ranks have combined themselves.
ROWS = Transfer("ROWS", _rows_to_data_groups, join, Mesh.group_outputs)
ONE_TO_FIRST = Transfer("ONE_TO_FIRST", _same, _first, _rank_0)
ROWS_TO_FIRST = Transfer("ROWS_TO_FIRST", _mini_batches_to_data_groups, _first, _rank_0)
