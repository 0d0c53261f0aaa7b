"""In-process group: one worker object called directly; for tests, debugging and machines without Ray."""

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.controller.dispatch import Arguments, perform
from engine.controller.group import Running, Span, WorkerGroup, worker_error
from engine.controller.mesh import Mesh
from engine.controller.worker import Worker, WorkerContext


@dataclass(frozen=True)
class Done(Running):
    """A call that ran when it was submitted."""

    span: Span
    value: Any

    def wait(self) -> list[Span]:
        """When the call ran."""
        return [self.span]

    def results(self, ranks: Sequence[int]) -> list[Any]:
        """The result of the only rank, for each that is asked for."""
        return [self.value for _ in ranks]


class LocalGroup(WorkerGroup):
    """A role of one rank in this process."""

    def __init__(self, worker: type[Worker], context: WorkerContext) -> None:
        super().__init__(context.role, Mesh())
        try:
            self._worker = worker(context)
        except Exception as error:
            raise worker_error(error, context.role, 0, "constructor", traceback.format_exc()) from error

    def _start(self, method: str, arguments: list[Arguments]) -> Done:
        began, started = time.time(), time.perf_counter()
        try:
            value = perform(getattr(self._worker, method), arguments[0])
        except Exception as error:
            raise worker_error(error, self.role, 0, method, traceback.format_exc()) from error
        return Done(Span(began, time.perf_counter() - started), value)

    def close(self) -> None:
        """Release the worker."""
        self._worker.close()
