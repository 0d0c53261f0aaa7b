"""What a dataflow is given and what it gives back: the roles it may call, where the run stands, what was learned."""

from dataclasses import dataclass, field, fields, replace

from engine.batch import Batch
from engine.config import RunConfig
from engine.controller.group import WorkerGroup
from engine.metrics import Metrics
from engine.seeds import permutation


@dataclass(frozen=True)
class Roles:
    """Worker groups by role; a role that the algorithm does not need is None."""

    policy: WorkerGroup
    rollout: WorkerGroup
    reward: WorkerGroup
    reference: WorkerGroup | None = None
    # Present exactly where the algorithm uses them:
    critic: WorkerGroup = None  # type: ignore[assignment]
    cost: WorkerGroup = None  # type: ignore[assignment]
    cost_critic: WorkerGroup = None  # type: ignore[assignment]

    def groups(self) -> list[WorkerGroup]:
        """All groups there are."""
        present = (getattr(self, role.name) for role in fields(self))
        return [group for group in present if group is not None]


@dataclass(frozen=True)
class Progress:
    """Where the run stands: the iteration (from 1), the controllers that live from one iteration to the next and, where the
    algorithm also learns from supervised rows, those of this iteration with their `mini_batch`."""

    iteration: int
    controllers: dict[str, float] = field(default_factory=dict)
    demonstrations: Batch | None = None

    def with_controller(self, name: str, value: float) -> "Progress":
        """The same place with one controller set."""
        return replace(self, controllers={**self.controllers, name: value})


@dataclass(frozen=True)
class Learned:
    """Result of the training half: metrics and the controllers for the next iteration."""

    metrics: Metrics
    progress: Progress


def with_mini_batches(batch: Batch, config: RunConfig, iteration: int) -> Batch:
    """The batch with `mini_batch` set: a seeded shuffle cut into equal optimiser steps, the same for any ranks."""
    order = permutation(len(batch), config.seed, "mini_batches", iteration)
    numbers = order.clone()
    numbers[order] = (order.new_tensor(range(len(batch))) * config.train.mini_batches) // len(batch)
    return batch.with_fields(mini_batch=numbers)
