"""Flow hooks: what operators see, and what run.json says, when a flow fails, crashes or is cancelled.

Prefect may run them in the worker's process, after the flow's own is gone, and passes exactly flow, flow_run and state.
"""

import logging
import shlex
from typing import Any

from prefect import Flow
from prefect.client.schemas.objects import FlowRun, State

from engine.errors import ConfigError, StoreError, TransientError
from engine.remote_store import bring_run
from engine.repair import RUNNING
from engine.roots import is_remote
from engine.runs import read_record, run_folder
from tasks.attempts import finish
from tasks.refs import RunRef, opened
from tasks.report import failure_artifact
from tasks.requests import request_of

log = logging.getLogger(__name__)


def note_failure(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """The flow raised an error."""
    _note(flow_run, state, "failed")


def note_crash(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """The flow's process was ended from outside."""
    _note(flow_run, state, "failed")


def note_cancellation(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """An operator cancelled the flow run."""
    _note(flow_run, state, "cancelled")


def resume_command(ref: RunRef) -> str:
    """What an operator types to continue a run."""
    return f"hybridflow resume {ref.run_key} --root {shlex.quote(ref.root)}"


def _note(flow_run: FlowRun, state: State[Any], status: str) -> None:
    cause = state.message or "no cause was given"
    ref = _run_of(flow_run)
    if ref is None:
        command = f"prefect flow-run retry {flow_run.id}"
        failure_artifact(flow_run.id, flow_run.name, f"{cause}\n\nNo run directory was made.", command)
        return
    attempts = read_record(opened(ref).store.folder)["attempts"]
    if attempts and attempts[-1]["status"] == RUNNING and attempts[-1].get("flow_run") == str(flow_run.id):
        _finish(ref, status, cause)
    failure_artifact(flow_run.id, ref.run_key, cause, resume_command(ref))


def _finish(ref: RunRef, status: str, cause: str) -> None:
    """Note the end; of a run on object storage only its owner may, and the next attempt closes this one otherwise."""
    lease = opened(ref).store.lease
    before = lease.held
    try:
        if is_remote(ref.root):
            lease.acquire()
        finish(ref, status, cause)
    except (StoreError, TransientError) as error:
        log.warning("The end of this attempt could not be noted: %s", error)
    finally:
        if is_remote(ref.root) and not before and lease.held:
            lease.release()


def _run_of(flow_run: FlowRun) -> RunRef | None:
    """The run of a flow run; None if its parameters are wrong or it ended before there was one."""
    try:
        ref = request_of(flow_run).run
        return ref if bring_run(run_folder(ref.root, ref.run_key)) else None
    except ConfigError:
        return None
