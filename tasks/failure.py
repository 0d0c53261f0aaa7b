"""Flow hooks: what operators see, and what run.json says, when a flow fails, crashes or is cancelled.

Prefect may run them in the worker's process, after the flow's own is gone, and passes exactly flow, flow_run and state.
"""

import shlex
from typing import Any

from prefect import Flow
from prefect.client.schemas.objects import FlowRun, State

from engine.errors import ConfigError
from engine.runs import RECORD, read_record, run_folder
from tasks.attempts import RUNNING, finish
from tasks.refs import RunRef, opened
from tasks.report import failure_artifact
from tasks.requests import request_of


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
        finish(ref, status, cause)
    failure_artifact(flow_run.id, ref.run_key, cause, resume_command(ref))


def _run_of(flow_run: FlowRun) -> RunRef | None:
    """The run of a flow run; None if its parameters are wrong or it ended before there was one."""
    try:
        ref = request_of(flow_run).run
        return ref if (run_folder(ref.root, ref.run_key) / RECORD).is_file() else None
    except ConfigError:
        return None
