"""Base of every role's SPMD program: one object per rank, built where it runs."""

from dataclasses import dataclass
from pathlib import Path

from engine.config import RunConfig


@dataclass(frozen=True)
class WorkerContext:
    """Who a worker is: its role, its rank among the role's workers, and the run it works for."""

    role: str
    rank: int
    world_size: int
    config: RunConfig
    source: Path  # local Hugging Face folder of the base model


class Worker:
    """One rank of one role. Methods meant for the controller carry @dispatch; all ranks run each call together."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def close(self) -> None:
        """Release what the worker holds; called once before its process ends."""
