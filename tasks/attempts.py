"""Attempts: one process's work on a run, from taking the lease to the note in run.json about how it ended."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect.exceptions import TerminationSignal

from engine.errors import CancelledError, DivergedError, TransientError
from engine.runs import begin_attempt, end_attempt, read_record, write_record
from engine.store import Store, step_path
from tasks.refs import RunRef, opened
from tasks.sessions import close_session, warm_up
from tasks.tracking import end_tracking

log = logging.getLogger(__name__)
RUNNING, LOST = "running", "lost"
_TRACKED_AS = {"completed": "FINISHED", "rejected": "FINISHED", "cancelled": "KILLED"}


def begin_attempt_of(ref: RunRef) -> None:
    """Note that this process, which holds the lease, works on the run; attempts that never ended are noted as lost."""
    run = opened(ref)
    run.store.remove_drafts()
    record = read_record(run.store.folder)
    for attempt in record["attempts"]:
        if attempt["status"] == RUNNING:
            attempt["status"] = LOST
    write_record(run.store.folder, record)
    begin_attempt(run)
    note(ref, began=time.time(), iterations_before=iterations_done(run.store))


def resume_run(root: str, run_key: str) -> RunRef:
    """Take over an existing run from its record; joins the attempt that this process began already.

    Raises ConfigError if there is no such run, StoreError if a living process works on it.
    """
    from pathlib import Path

    ref = RunRef(str(Path(root).absolute()), run_key)
    lease = opened(ref).store.lease
    if not lease.held:
        lease.acquire()
        begin_attempt_of(ref)
    return ref


@contextmanager
def working_on(ref: RunRef) -> Iterator[None]:
    """Workers up inside, down afterwards; whatever ends the block early is noted in run.json and in MLflow."""
    try:
        warm_up(ref)
        yield
    except BaseException as error:
        finish(ref, status_of(error), f"{type(error).__name__}: {error}")
        raise
    finally:
        close_session(ref)
        opened(ref).store.lease.release()


def finish(ref: RunRef, status: str, error: str | None = None, tags: dict[str, str] | None = None) -> None:
    """Write the end of the attempt: completed, rejected, stopped, failed or cancelled."""
    end_attempt(opened(ref), status, error)
    try:
        end_tracking(ref, _TRACKED_AS.get(status, "FAILED"), {"status": status, **(tags or {})})
    except TransientError as fault:
        log.warning("MLflow does not know the end of this run: %s", fault)


def status_of(error: BaseException) -> str:
    """How an attempt ended that raised this."""
    if isinstance(error, DivergedError):
        return "stopped"
    if isinstance(error, CancelledError | KeyboardInterrupt | SystemExit | TerminationSignal):
        return "cancelled"
    return "failed"


def current(ref: RunRef) -> dict[str, Any]:
    """The last attempt as recorded: began (seconds since the epoch), iterations_before, status, flow_run ..."""
    attempt: dict[str, Any] = read_record(opened(ref).store.folder)["attempts"][-1]
    return attempt


def note(ref: RunRef, **values: Any) -> None:
    """Add values to the last attempt's record."""
    folder = opened(ref).store.folder
    record = read_record(folder)
    record["attempts"][-1].update(values)
    write_record(folder, record)


def iterations_done(store: Store) -> int:
    """How many iterations have committed weights or their replayable experience, counted from the first."""
    done = 0
    while store.committed(step_path("train", done + 1)):
        done += 1
    return done
