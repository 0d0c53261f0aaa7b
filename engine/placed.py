"""The running worker groups of a run: how they are ended, and how they are started in the background and again."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic, TypeVar

log = logging.getLogger(__name__)
R = TypeVar("R")  # what holds the groups by role


@dataclass(frozen=True)
class Placed(Generic[R]):
    """The running groups of a run and, in `stack`, how to end them."""

    roles: R
    stack: ExitStack

    def close(self) -> None:
        """End everything, last started first."""
        self.stack.close()


class Workers(Generic[R]):
    """Starts the groups of a run when they are first wanted, ends them, and starts them again after that.

    place: starts all of them; its argument tells whether they have been up before.
    """

    def __init__(self, place: Callable[[bool], Placed[R]]) -> None:
        self._place = place
        self._executor = ThreadPoolExecutor(1)
        self._starting: Future[Placed[R]] | None = None
        self._was_up = False

    def warm_up(self) -> None:
        """Begin starting them in the background; errors surface when they are asked for."""
        if self._starting is None:
            # The thread is kept until close: an embedded cluster ends with the thread that started it.
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="placement")
            self._starting = self._executor.submit(self._place, self._was_up)

    def roles(self) -> R:
        """The groups by role, once they are up."""
        self.warm_up()
        assert self._starting is not None
        roles = self._starting.result().roles
        self._was_up = True
        return roles

    def close(self) -> None:
        """End all processes; harmless when repeated."""
        starting, self._starting = self._starting, None
        if starting is None:
            return
        if starting.exception() is None:
            began = time.perf_counter()
            starting.result().close()
            log.info("The workers have ended, which took %.1f s.", time.perf_counter() - began)
        self._executor.shutdown()
