"""WorkerGroup: the controller's handle on all ranks of one role; calls take the method object, so editors follow it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import OutOfMemoryError

from engine.controller.dispatch import Arguments, Transfer, shares
from engine.controller.mesh import Mesh
from engine.errors import DeviceMemoryError, HybridFlowError, WorkerError


@dataclass(frozen=True)
class Span:
    """When one rank was inside a method, by the clock of its host; waiting for inputs comes before."""

    began: float  # seconds since the epoch
    seconds: float


class Running(ABC):
    """A method under way on all ranks of a role."""

    @abstractmethod
    def wait(self) -> list[Span]:
        """Wait for every rank; when each was inside the method. Raises what a rank raised."""

    @abstractmethod
    def results(self, ranks: Sequence[int]) -> list[Any]:
        """What these ranks returned, in this order."""


class Pending:
    """A call under way; given to another group's submit it goes there without passing through the controller.

    `result()` waits, collects and remembers; errors name role, rank and method.
    """

    def __init__(self, group: "WorkerGroup", method: str, transfer: Transfer, running: Running) -> None:
        self.group = group
        self.transfer = transfer
        self.running = running
        self._method = method
        self._done = False
        self._value: Any = None

    def result(self) -> Any:
        """The collected result. Raises what the worker raised, TransientError if it died or took too long."""
        if not self._done:
            self.group.note(self._method, self.running.wait())
            self._value = self.transfer.collect(self.running.results(self.transfer.sources(self.group.mesh)))
            self._done = True
        return self._value


class WorkerGroup(ABC):
    """All ranks of one role."""

    def __init__(self, role: str, mesh: Mesh) -> None:
        self.role = role
        self.mesh = mesh
        self._seconds: dict[str, float] = {}
        self._spans: list[Span] = []

    def submit(self, method: Callable[..., Any], *arguments: Any) -> Pending:
        """Start `method` on all ranks, each argument spread by the method's protocol; a Pending is a valid argument."""
        spread = [self._spread(method, value) for value in arguments]
        by_rank = [tuple(parts[rank] for parts in spread) for rank in range(self.mesh.size)]
        transfer: Transfer = method.transfer  # type: ignore[attr-defined]
        return Pending(self, method.__name__, transfer, self._start(method.__name__, by_rank))

    def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Submit and wait."""
        return self.submit(method, *arguments).result()

    def note(self, method: str, spans: Sequence[Span]) -> None:
        """Note when the ranks were busy with a call."""
        name = f"{self.role}.{method}"
        self._seconds[name] = self._seconds.get(name, 0.0) + max(span.seconds for span in spans)
        self._spans += spans

    def take_seconds(self) -> dict[str, float]:
        """Seconds that the slowest rank spent in each `role.method` since last asked; waiting for inputs is left out."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def take_spans(self) -> list[Span]:
        """When ranks were inside methods since last asked."""
        spans, self._spans = self._spans, []
        return spans

    def _spread(self, method: Callable[..., Any], value: Any) -> Sequence[Any]:
        """One argument as every rank is sent it."""
        return shares(method, value.result() if isinstance(value, Pending) else value, self.mesh)

    @abstractmethod
    def _start(self, method: str, arguments: list[Arguments]) -> Running:
        """Start the method on every rank with its arguments."""


def busy_seconds(spans: Sequence[Span]) -> float:
    """Length of time in which at least one rank was busy: what overlaps counts once."""
    total, until = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.began):
        end = span.began + span.seconds
        total += max(end - max(span.began, until), 0.0)
        until = max(until, end)
    return total


def worker_error(error: BaseException, role: str, rank: int, method: str, trace: str) -> HybridFlowError:
    """What the controller raises for an error of a worker: ours keep their class, a device's lack of memory becomes
    DeviceMemoryError, all others WorkerError."""
    if isinstance(error, HybridFlowError):
        error.where.setdefault("role", role)
        error.where.setdefault("rank", rank)
        return error
    if isinstance(error, OutOfMemoryError):
        remedy = "Lower train.micro_batch_tokens or rollout.gpu_memory_utilization, or use more ranks."
        return DeviceMemoryError(f"{method} ran out of memory: {error}.", role=role, rank=rank, remedy=remedy)
    return WorkerError(
        f"{method} raised {type(error).__name__}: {error}.",
        role=role,
        rank=rank,
        remedy=f"This is a fault of the code or its libraries.\n{trace}",
    )
