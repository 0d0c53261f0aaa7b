"""Workers without models, for tests of groups and placement; importable in the processes of a cluster."""

import os
import time

import torch
import torch.distributed as dist

from engine.batch import Batch
from engine.controller.dispatch import (
    ALL_TO_ALL,
    DP,
    ONE_TO_ALL,
    THREE_D,
    THREE_D_ALL_MICRO_DP,
    THREE_D_PP_ONLY,
    dispatch,
)
from engine.controller.worker import Worker, WorkerContext


class Plain(Worker):
    """Small operations on the field `values` [B, R] and on who the rank is."""

    @dispatch(DP)
    def widen(self, batch: Batch, columns: int) -> Batch:
        """`values`, repeated to this many columns."""
        return Batch({"values": batch.values.repeat(1, columns), "group_ids": batch.group_ids})

    @dispatch(DP, reads=("values", "group_ids"))
    def double(self, batch: Batch) -> Batch:
        """Twice the values."""
        return batch.with_fields(values=batch.values * 2)

    @dispatch(THREE_D)
    def add_rank(self, batch: Batch) -> Batch:
        """Each value plus the rank that answers for it."""
        return Batch({"values": batch.values + self.context.rank})

    @dispatch(THREE_D_ALL_MICRO_DP)
    def add_rank_of_replica(self, batch: Batch) -> Batch:
        """The same."""
        return Batch({"values": batch.values + self.context.rank})

    @dispatch(DP)
    def sums(self, batch: Batch) -> Batch:
        """Sum of each row's values, as scores."""
        return Batch({"scores": batch.values.sum(dim=1)})

    @dispatch(ONE_TO_ALL)
    def rows(self, batch: Batch) -> list[int]:
        """Group ids that this rank was sent."""
        return [int(number) for number in batch.group_ids]

    @dispatch(THREE_D_PP_ONLY)
    def rank(self) -> int:
        """Who answers."""
        return self.context.rank

    @dispatch(ALL_TO_ALL)
    def echo(self, text: str) -> str:
        """What this rank was given."""
        return f"{self.context.rank} {text}"

    @dispatch(ONE_TO_ALL)
    def sleep(self, seconds: float) -> None:
        """Do nothing for a while."""
        time.sleep(seconds)

    @dispatch(ONE_TO_ALL)
    def total_over_ranks(self, number: float) -> float:
        """Sum of (number + rank) over the ranks, by torch.distributed."""
        total = torch.tensor(number + self.context.rank)
        dist.all_reduce(total)
        return float(total)

    @dispatch(DP)
    def divide_by_zero(self, batch: Batch) -> Batch:
        """Fails on rank 1 alone."""
        return batch if self.context.rank != 1 else batch.with_fields(values=batch.values / (1 // 0))

    @dispatch(ONE_TO_ALL)
    def die(self) -> None:
        """End this process at once."""
        os._exit(1)


class Unbuildable(Worker):
    """Its constructor fails on the last rank, a moment after the others are built."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        if context.rank == context.world_size - 1:
            time.sleep(1.0)
            raise ZeroDivisionError("no weights were drawn")
