"""In-process group: one worker object called directly; for tests, debugging and machines without Ray."""

import traceback
from collections.abc import Callable
from typing import Any

from engine.controller.group import WorkerGroup, worker_error
from engine.controller.worker import Worker, WorkerContext


class LocalGroup(WorkerGroup):
    """A role of one rank in this process."""

    def __init__(self, worker: type[Worker], context: WorkerContext) -> None:
        super().__init__(context.role, 1)
        self._worker = worker(context)

    def _start(self, method: str, arguments: list[tuple[Any, ...]]) -> Callable[[], list[Any]]:
        try:
            result = getattr(self._worker, method)(*arguments[0])
        except Exception as error:
            raise worker_error(error, self.role, 0, method, traceback.format_exc()) from error
        return lambda: [result]

    def close(self) -> None:
        """Release the worker."""
        self._worker.close()
