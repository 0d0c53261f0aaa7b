"""Scorer processes that can be killed: one sample at a time, a hard deadline for each, replaced when they hang or die.

Threads and signals cannot stop foreign code: an alarm works only in a main thread, and neither reaches a loop inside C.
Processes are spawned, not forked, because the caller may hold threads of torch or Ray. Linux only.
"""

import fcntl
import math
import multiprocessing
import os
import resource
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import pebble

from engine.errors import TransientError
from engine.reward.scorer import Cause, Sample, Score, Unscored, as_score
from engine.reward.verifiers import Verifier

START_S = 120.0  # for all processes to start and import; only a bound, never waited for
KILL_S = 1.0  # for one process to be killed and replaced

# Between SIGTERM and SIGKILL the pool keeps its pipe locked, and siblings that are done cannot say so. Scorers have
# nothing to clean up: kill at once.
pebble.CONSTS.term_timeout = 0.1


class IsolatedScorer:
    """A verifier in `workers` killable processes, started by the first call; safe to call from any thread or process.

    factory: picklable; called once in every process, where it imports its library; returns the function for one sample.
    timeout_s: for one sample, from the moment a process takes it; the import does not count.
    memory_bytes: what a process may allocate after its start; above it, MemoryError. None = no limit.
    """

    def __init__(
        self, name: str, factory: Callable[[], Verifier], *, timeout_s: float, workers: int, memory_bytes: int | None
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.workers = workers
        self._initializer = partial(_start, factory, memory_bytes)
        self._pool: pebble.ProcessPool | None = None
        self._lock = threading.Lock()

    def score(self, samples: Iterable[Sample]) -> list[Score]:
        """One entry per sample, in order. Raises TransientError if the processes fail while samples are handed out."""
        pool = self._running_pool()
        try:
            futures = [pool.schedule(_score_in_process, args=(sample,), timeout=self.timeout_s) for sample in samples]
        except RuntimeError as error:  # what the pool raises once its processes cannot be started
            self._stop(pool)
            raise TransientError(f"The scorer processes of {self.name} ended while they were given samples.") from error
        self._wait(pool, futures)
        return [self._outcome(future) for future in futures]

    def close(self) -> None:
        """Kill the processes, busy or not; returns when they are gone."""
        if self._pool is not None:
            self._stop(self._pool)

    def _running_pool(self) -> pebble.ProcessPool:
        with self._lock:
            if self._pool is None or not self._pool.active:
                context = multiprocessing.get_context("spawn")
                self._pool = pebble.ProcessPool(self.workers, initializer=self._initializer, context=context)
            return self._pool

    def _wait(self, pool: pebble.ProcessPool, futures: Sequence[Future[Score]]) -> None:
        rounds = math.ceil(len(futures) / self.workers)
        deadline = time.monotonic() + START_S + rounds * (self.timeout_s + KILL_S)
        while wait(futures, timeout=1.0).not_done:
            if not pool.active or time.monotonic() > deadline:
                self._stop(pool)
                return

    def _stop(self, pool: pebble.ProcessPool) -> None:
        with self._lock:
            pool.stop()
            pool.join()
            if self._pool is pool:
                self._pool = None

    def _outcome(self, future: Future[Score]) -> Score:
        if not future.done():
            return Unscored("lost", f"the scorer processes of {self.name} ended or never started")
        error = future.exception()
        if error is None:
            return future.result()
        if isinstance(error, TimeoutError):
            return Unscored("timeout", f"{self.name} took longer than {self.timeout_s} s and was killed")
        if isinstance(error, pebble.ProcessExpired):
            return Unscored("lost", f"the scorer process of {self.name} died with exit code {error.exitcode}")
        if isinstance(error, BrokenProcessPool):
            return Unscored("lost", f"the scorer processes of {self.name} ended while starting")
        raise error


# The rest runs in the scorer process.
_verifier: Verifier | Unscored = Unscored("start", "the scorer process was not initialised")


def _start(factory: Callable[[], Verifier], memory_bytes: int | None) -> None:
    global _verifier
    _die_with_parent()
    _verifier = _attempt("start", factory)
    if memory_bytes is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[5])  # data and stack, as RLIMIT_DATA counts them
        limit = pages * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _score_in_process(sample: Sample) -> Score:
    verifier = _verifier
    if isinstance(verifier, Unscored):
        return verifier
    score: Score = _attempt("error", lambda: as_score(verifier(sample)))
    return score


def _attempt(cause: Cause, call: Callable[[], Any]) -> Any:
    """Boundary to code that is not ours: whatever it raises, sys.exit included, becomes a reason.

    The exception itself must not travel: one that does not unpickle in the caller would break the whole pool.
    """
    try:
        return call()
    except BaseException:  # noqa: BLE001
        return Unscored(cause, traceback.format_exc())


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, even while C code runs that lets no signal handler run.

    The parent keeps the other end of the sentinel pipe open as long as it lives. (PR_SET_PDEATHSIG would also fire when
    only the thread that started the process ends.)
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs only in a spawned process"
    pipe = parent.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if not parent.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)
