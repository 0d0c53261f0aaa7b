"""Attempts: one process's work on a run, from taking the lease to the note in run.json about how it ended."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect.exceptions import Pause, TerminationSignal

from engine.errors import CancelledError, DivergedError, HybridFlowError, TransientError
from engine.offlineconfig import OfflineConfig
from engine.outlook import outlook
from engine.repair import close_attempts
from engine.roots import absolute_root
from engine.runs import Run, begin_attempt, end_attempt, read_record, write_record
from engine.store import Store, step_path
from tasks.base_models import found_here
from tasks.refs import RunRef, opened, remember
from tasks.sessions import close_session, warm_up
from tasks.tracking import end_tracking

log = logging.getLogger(__name__)
_TRACKED_AS = {"completed": "FINISHED", "rejected": "FINISHED", "cancelled": "KILLED", "suspended": "SCHEDULED"}


def begin_attempt_of(ref: RunRef) -> None:
    """Note that this process, which holds the lease, works on the run; attempts that never ended are noted as lost."""
    run = opened(ref)
    run.store.remove_drafts()
    record = read_record(run.store.folder)
    close_attempts(record)
    write_record(run.store.folder, record)
    begin_attempt(run)
    plan = plan_of(ref)
    note(ref, began=time.time(), iterations_before=done_of(run), plan=plan)
    if plan is not None:
        log.info("%s is continued: %s.", ref.run_key, plan)


def plan_of(ref: RunRef) -> str | None:
    """What continuing a run would reuse, and the first step that it would run; None for a run that begins."""
    run = opened(ref)
    ahead = outlook(run.store, run.config.model_dump(mode="json"))
    return ahead.text if len(ahead.reused) > 1 else None


def resume_run(root: str, run_key: str) -> RunRef:
    """Take over an existing run from its record; joins the attempt that this process began already.

    Raises ConfigError if there is no such run, StoreError if a living process works on it.
    """
    ref = RunRef(absolute_root(root), run_key)
    lease = opened(ref).store.lease
    if not lease.held:
        remember(found_here(opened(ref)))
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
        _note_end(ref, error)
        raise
    finally:
        close_session(ref)
        opened(ref).store.lease.release()


def finish(ref: RunRef, status: str, error: str | None = None, tags: dict[str, str] | None = None) -> None:
    """Write the end of the attempt: completed, rejected, stopped, failed, cancelled or suspended."""
    end_attempt(opened(ref), status, error)
    try:
        end_tracking(ref, _TRACKED_AS.get(status, "FAILED"), {"status": status, **(tags or {})})
    except TransientError as fault:
        log.warning("MLflow does not know the end of this run: %s", fault)


def _note_end(ref: RunRef, error: BaseException) -> None:
    """As `finish`; if that fails as well, on a full disk say, the first error is still the one to tell."""
    try:
        finish(ref, status_of(error), None if isinstance(error, Pause) else f"{type(error).__name__}: {error}")
    except (OSError, HybridFlowError) as second:
        log.warning("The end of this attempt could not be noted: %s", second)


def status_of(error: BaseException) -> str:
    """How an attempt ended that raised this."""
    if isinstance(error, DivergedError):
        return "stopped"
    if isinstance(error, Pause):
        return "suspended"
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


def done_of(run: Run[Any]) -> int:
    """How many iterations of a run are committed; of a run on fixed rows, optimiser steps."""
    if isinstance(run.config, OfflineConfig):
        return max(steps_done(run.store), default=0)
    return iterations_done(run.store)


def steps_done(store: Store) -> list[int]:
    """Optimiser steps of a run on fixed rows with committed weights, in one unbroken chain from the start checkpoint."""
    numbers = sorted(int(folder.name) for folder in (store.folder / "iterations").glob("*") if folder.name.isdigit())
    done: list[int] = []
    model = store.committed("start")
    for number in numbers:
        if model is None or (step := store.committed(step_path("train", number), parent=model)) is None:
            break
        model = step
        done.append(number)
    return done


def iterations_done(store: Store) -> int:
    """How many iterations are committed in one unbroken chain from the start checkpoint."""
    done, policy = 0, store.committed("start")
    while policy is not None:
        experience = store.committed(step_path("rollout", done + 1), parent=policy)
        policy = store.committed(step_path("train", done + 1), parent=experience) if experience else None
        done += policy is not None
    return done
