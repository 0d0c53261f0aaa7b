"""The ranks of one trainer: who holds other rows, who holds other parts of every layer, and what they tell each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from engine.backends.base import TrainerSpec
from engine.backends.device import collective_backend
from engine.batch import Batch
from engine.errors import HybridFlowError, ShapeError
from engine.metrics import Metrics, merge


@dataclass(frozen=True)
class Axis:
    """Ranks that do one thing together, as this rank sees them. group: None where it is the only one."""

    size: int
    rank: int
    group: Any
    device: torch.device


@dataclass(frozen=True)
class Mesh:
    """Rank d * tensor.size + t is number d of the data axis (other rows) and number t of the tensor axis (other parts).

    device_mesh: the same for torch's own functions, dimensions "data" and "tensor"; None where there is one rank and no
    process group.
    """

    everyone: Axis
    data: Axis
    tensor: Axis
    device_mesh: Any


def open_mesh(spec: TrainerSpec, *, alone: bool = False) -> Mesh:
    """The mesh of the spec's ranks, which all call this together.

    alone: make the process group of a single rank too, because a library asks for one.
    """
    single = Axis(1, 0, None, spec.device)
    if spec.world_size == 1 and not alone:
        return Mesh(single, single, single, None)
    require_group(spec)
    tensor = spec.train.tensor_parallel
    device_mesh = init_device_mesh(
        spec.device.type, (spec.world_size // tensor, tensor), mesh_dim_names=("data", "tensor")
    )
    return Mesh(
        everyone=_axis(spec.world_size, spec.rank, dist.group.WORLD, spec.device),
        data=_axis(spec.world_size // tensor, spec.rank // tensor, device_mesh["data"].get_group(), spec.device),
        tensor=_axis(tensor, spec.rank % tensor, device_mesh["tensor"].get_group(), spec.device),
        device_mesh=device_mesh,
    )


def everyone(spec: TrainerSpec) -> Axis:
    """All ranks of the spec."""
    return _axis(spec.world_size, spec.rank, dist.group.WORLD, spec.device)


def _axis(size: int, rank: int, group: Any, device: torch.device) -> Axis:
    return Axis(size, rank, group if size > 1 else None, device)


def require_group(spec: TrainerSpec) -> None:
    """Make sure a process group of the spec's ranks exists; a single rank makes its own, without any network port."""
    if not dist.is_initialized():
        if spec.world_size > 1:
            raise HybridFlowError(
                f"a trainer of {spec.world_size} ranks was built before they met.",
                remedy="Join the group on every rank first.",
                rank=spec.rank,
            )
        dist.init_process_group(collective_backend(spec.device), store=dist.HashStore(), rank=0, world_size=1)
    if (dist.get_rank(), dist.get_world_size()) != (spec.rank, spec.world_size):
        raise HybridFlowError(
            f"the trainer is rank {spec.rank} of {spec.world_size}; the process group of this process says rank "
            f"{dist.get_rank()} of {dist.get_world_size()}.",
            remedy="Build each role's trainer in processes of its own group.",
        )


def most_parts(count: int, axis: Axis) -> int:
    """Largest number of micro-batches that a rank of the axis holds."""
    if axis.size == 1:
        return count
    largest = torch.tensor(count, device=axis.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=axis.group)
    return int(largest)


def most_parts_to_learn(count: int, axis: Axis) -> int:
    """The same for an optimiser step, which must have something to learn from; ShapeError if no rank has anything."""
    most = most_parts(count, axis)
    _require_parts(most, axis)
    return most


def _require_parts(count: int, axis: Axis) -> None:
    if count == 0:
        raise ShapeError("an optimiser step was asked for without a single micro-batch on any rank.", rank=axis.rank)


def require_same_rows(parts: Sequence[Batch], axis: Axis) -> None:
    """ShapeError unless all ranks of a tensor axis were given the same tokens; each computes a part of their output."""
    if axis.size == 1:
        return
    ids = torch.cat([part.input_ids.flatten() for part in parts]) if parts else torch.zeros(0, dtype=torch.int64)
    places = torch.arange(1, len(ids) + 1, device=ids.device)
    counts = [len(parts), len(ids), int(ids.sum()), int((ids * places).sum())]
    lowest = torch.tensor(counts, device=axis.device)
    highest = lowest.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=axis.group)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=axis.group)
    if not torch.equal(lowest, highest):
        raise ShapeError(
            f"the {axis.size} tensor-parallel ranks of one copy of the model were given different rows.",
            remedy="Deal rows over the data-parallel ranks only (train.tensor_parallel consecutive ranks share theirs).",
            tensor_rank=axis.rank,
        )


def sum_over_ranks(tensors: Sequence[Tensor], axis: Axis) -> None:
    """Replace every tensor by its sum over the ranks; small ones, because all of them travel in one message."""
    if axis.size == 1 or not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=axis.group)
    for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))


def gather_along(part: Tensor, axis: Axis, dim: int, size: int) -> Tensor:
    """The whole of a tensor that `torch.chunk` cut along `dim` over the ranks; size: of the whole in that dimension."""
    if axis.size == 1:
        return part
    longest = -(-size // axis.size)
    missing = longest - part.shape[dim]
    rows = part.movedim(dim, 0).contiguous()
    padded = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows
    gathered = [torch.empty_like(padded) for _ in range(axis.size)]
    dist.all_gather(gathered, padded, group=axis.group)
    return torch.cat(gathered)[:size].movedim(0, dim).contiguous()


def part_along(whole: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's part of a whole tensor, a view; the last ranks may have fewer rows or none."""
    longest = -(-whole.shape[dim] // axis.size)
    start = min(axis.rank * longest, whole.shape[dim])
    return whole.narrow(dim, start, min(longest, whole.shape[dim] - start))


def merge_over_ranks(metrics: Metrics, parts: int, axis: Axis) -> Metrics:
    """Metrics of all ranks combined, in rank order, so that every rank has the same numbers.

    parts: micro-batches of this rank that they are of. ShapeError if no rank had any.
    """
    gathered = [(metrics, parts)] * axis.size
    if axis.size > 1:
        dist.all_gather_object(gathered, (metrics, parts), group=axis.group)
    _require_parts(sum(count for _, count in gathered), axis)
    return merge(found for found, _ in gathered)
