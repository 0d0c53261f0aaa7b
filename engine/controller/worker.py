"""Base of every role's SPMD program: one object per rank, built where it runs."""

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.backends.device import peak_memory, peak_rate, pick_device
from engine.controller.dispatch import ONE_TO_ALL, ONE_TO_FIRST, dispatch
from engine.controller.stream import Result
from engine.utilisation import Resources


@dataclass(frozen=True)
class WorkerContext:
    """Who a worker is: its role, its rank among the role's workers, and the run it works for.

    config: a RunConfig, or the OfflineConfig of a run on fixed rows, of which the roles are other ones.
    models: local folders of the other models that the configuration names, by the key of the option (`reward[0]`).
    """

    role: str
    rank: int
    world_size: int
    config: Any
    source: Path  # local Hugging Face folder of the base model
    models: Mapping[str, Path] = field(default_factory=dict)


class Worker:
    """One rank of one role. Methods meant for the controller carry @dispatch; all ranks run each call together."""

    shows_rows = False  # whether methods give single rows of their result to `show_row` while they run

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.show_row: Callable[[int, Result], None] = _unread  # a row that is finished, and how rows are read

    @dispatch(ONE_TO_ALL)
    def resources(self) -> Resources:
        """What the process of this rank has used and what its device can do."""
        device = pick_device()
        return Resources(
            process=f"{socket.gethostname()}:{os.getpid()}",
            peak_bytes=peak_memory(device),
            rate=peak_rate(self.context.config.model.dtype, device),
        )

    @dispatch(ONE_TO_FIRST)
    def device(self) -> str:
        """Type of the device that this role computes on."""
        return pick_device().type

    def close(self) -> None:
        """Release what the worker holds; called once before its process ends."""


def _unread(row: int, result: Result) -> None:
    """In one process whoever needs a result is called when the whole is there."""
