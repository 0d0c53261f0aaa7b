"""Collectives between the ranks of one role: process group, largest count, sums of gradients, combined metrics."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from engine.backends.base import TrainerSpec
from engine.backends.device import collective_backend
from engine.errors import HybridFlowError, ShapeError
from engine.metrics import Metrics, merge

BUCKET = 25_000_000  # gradient elements that travel in one all-reduce


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


def most_parts(count: int, spec: TrainerSpec) -> int:
    """Largest number of micro-batches that a rank holds."""
    if spec.world_size == 1:
        return count
    largest = torch.tensor(count, device=spec.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def most_parts_to_learn(count: int, spec: TrainerSpec) -> int:
    """The same for an optimiser step, which must have something to learn from; ShapeError if no rank has anything."""
    most = most_parts(count, spec)
    if most == 0:
        raise ShapeError("an optimiser step was asked for without a single micro-batch on any rank.", rank=spec.rank)
    return most


def sum_over_ranks(tensors: Sequence[Tensor], spec: TrainerSpec) -> None:
    """Replace every tensor by its sum over the ranks; few large messages instead of one for each tensor."""
    if spec.world_size == 1:
        return
    bucket: list[Tensor] = []
    for number, tensor in enumerate(tensors):
        bucket.append(tensor)
        if sum(t.numel() for t in bucket) >= BUCKET or number == len(tensors) - 1:
            flat = torch.cat([t.reshape(-1) for t in bucket])
            dist.all_reduce(flat)
            for target, total in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                target.copy_(total.view_as(target))
            bucket = []


def merge_over_ranks(metrics: Metrics, spec: TrainerSpec) -> Metrics:
    """Metrics of all ranks combined, in rank order, so that every rank has the same numbers."""
    if spec.world_size == 1:
        return metrics
    gathered: list[Metrics] = [Metrics()] * spec.world_size
    dist.all_gather_object(gathered, metrics)
    return merge(gathered)
