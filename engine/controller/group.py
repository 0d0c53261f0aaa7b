"""WorkerGroup: the controller's handle on all ranks of one role; calls take the method object, so editors follow it."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from engine.controller.dispatch import prepare
from engine.errors import HybridFlowError, WorkerError


class Pending:
    """A call under way. `result()` waits, collects and remembers; errors name role, rank and method."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self._wait: Callable[[], Any] | None = wait
        self._value: Any = None

    def result(self) -> Any:
        """The collected result. Raises what the worker raised, TransientError if it died or took too long."""
        if self._wait is not None:
            self._value = self._wait()
            self._wait = None
        return self._value


class WorkerGroup(ABC):
    """All ranks of one role."""

    def __init__(self, role: str, world_size: int) -> None:
        self.role = role
        self.world_size = world_size
        self._seconds: dict[str, float] = {}

    def submit(self, method: Callable[..., Any], *arguments: Any) -> Pending:
        """Start `method` on all ranks, the arguments spread by its protocol; a Pending argument is waited for first."""
        ready = tuple(value.result() if isinstance(value, Pending) else value for value in arguments)
        ready = prepare(method, ready)
        transfer = method.transfer  # type: ignore[attr-defined]
        started = time.perf_counter()
        wait = self._start(method.__name__, transfer.spread(ready, self.world_size))

        def collect() -> Any:
            result = transfer.collect(ready, wait())
            name = f"{self.role}.{method.__name__}"
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started
            return result

        return Pending(collect)

    def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Submit and wait."""
        return self.submit(method, *arguments).result()

    def take_seconds(self) -> dict[str, float]:
        """Wall seconds from submit to result per `role.method` since last asked."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    @abstractmethod
    def _start(self, method: str, arguments: list[tuple[Any, ...]]) -> Callable[[], list[Any]]:
        """Start the method on every rank; the returned function waits for all results in rank order."""


def worker_error(error: BaseException, role: str, rank: int, method: str, trace: str) -> HybridFlowError:
    """What the controller raises for an error of a worker: ours keep their class, others become WorkerError."""
    if isinstance(error, HybridFlowError):
        error.where.setdefault("role", role)
        error.where.setdefault("rank", rank)
        return error
    return WorkerError(
        f"{method} raised {type(error).__name__}: {error}.",
        role=role,
        rank=rank,
        remedy=f"This is a fault of the code or its libraries.\n{trace}",
    )
