"""SIGTERM in the middle of a step: the machine is wanted back, and says so some seconds before it goes.

A step that is all but done may use those seconds to commit itself (`checkpoint.grace_s`); a cancelled one must not.
The flow run of a deployment is then suspended, and resumed it goes on behind that step.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from types import FrameType
from uuid import UUID

import httpx
from prefect import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import TerminationSignal
from prefect.flow_runs import suspend_flow_run

log = logging.getLogger(__name__)
_ASK_S = 1.0  # between two questions whether the flow run was cancelled


@contextmanager
def unhurried(grace_s: float) -> Iterator[None]:
    """After SIGTERM the block may go on for up to `grace_s` seconds; TerminationSignal once they are over.

    At its end a flow run of a deployment is suspended, which ends it before its next task; any other is ended by
    TerminationSignal. A second SIGTERM, or the news that the flow run is being cancelled, ends the block at once. With 0,
    or outside of the main thread, SIGTERM does what it would do anyway.
    """
    if grace_s == 0 or threading.current_thread() is not threading.main_thread():
        yield
        return
    patience = _Patience(grace_s)
    before = signal.signal(signal.SIGTERM, patience.on_signal)
    try:
        yield
    finally:
        patience.over.set()
        signal.signal(signal.SIGTERM, before)
    if patience.asked:
        log.warning("The step that SIGTERM fell into is committed; the next start goes on behind it.")
        if not patience.suspended():
            raise TerminationSignal(signal=signal.SIGTERM)


class _Patience:
    """What is known of one block: whether its end was asked for, and whether it is over."""

    def __init__(self, grace_s: float) -> None:
        context = FlowRunContext.get()
        self._flow_run = context.flow_run if context is not None else None
        self._grace_s = grace_s
        self.asked = False
        self.over = threading.Event()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal starts the clock, the second one ends the block."""
        if self.asked:
            raise TerminationSignal(signal=number)
        self.asked = True
        within = copy_context()  # so that what the thread says is shown on the flow run's page
        threading.Thread(target=within.run, args=(self._wait,), name="preemption", daemon=True).start()

    def suspended(self) -> bool:
        """Suspend the flow run; False where Prefect could not start it again, or was not reached."""
        if self._flow_run is None or self._flow_run.deployment_id is None:
            return False
        try:
            suspend_flow_run(flow_run_id=self._flow_run.id)
        except (RuntimeError, httpx.HTTPError) as error:  # RuntimeError: it was cancelled meanwhile
            log.warning("The flow run is not suspended: %s", error)
            return False
        return True

    def _wait(self) -> None:
        log.warning("SIGTERM: the present step may go on for %g s, then it is given up.", self._grace_s)
        deadline = time.monotonic() + self._grace_s
        while time.monotonic() < deadline and not self._cancelled():
            if self.over.wait(min(_ASK_S, max(0.0, deadline - time.monotonic()))):
                return
        os.kill(os.getpid(), signal.SIGTERM)

    def _cancelled(self) -> bool:
        return self._flow_run is not None and _is_cancelled(self._flow_run.id)


def _is_cancelled(flow_run: UUID) -> bool:
    """Whether an operator has cancelled it; a server that does not answer has not said so."""
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(flow_run).state
    except httpx.HTTPError:
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())
