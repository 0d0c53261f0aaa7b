"""Which run a flow run works on: named by its key, or made from a configuration under a key that a retry finds again."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed

from engine.config import RunConfig
from engine.errors import ConfigError, Problem
from engine.loading import load_config
from engine.runs import read_record
from tasks.attempts import LOST, note, resume_run
from tasks.data import start_run
from tasks.refs import RunRef, opened

DEFAULT_ROOT = "runs"


@dataclass(frozen=True)
class Request:
    """What a flow's parameters ask for; config is None where a recorded run is continued as it is."""

    run: RunRef
    config: RunConfig | None


def request_of(flow_run: FlowRun) -> Request:
    """The run that a flow run's parameters name. Raises ConfigError if they name none."""
    given: dict[str, Any] = {"config": None, "overrides": [], "run_key": None, "root": None} | flow_run.parameters
    if given["config"] is None:
        if given["run_key"] is None:
            remedy = "give config, or the run_key of an existing run"
            raise ConfigError("There is nothing to run.", problems=[Problem("config", None, remedy)])
        root = Path(given["root"] or DEFAULT_ROOT).absolute()
        return Request(RunRef(str(root), given["run_key"]), None)
    config = load_config(given["config"], given["overrides"])
    if given["root"] is not None:
        config = config.model_copy(update={"root": given["root"]})
    if "source" in given:
        config = _evaluation_of(given["source"], config)
    return Request(RunRef(str(Path(config.root).absolute()), given["run_key"] or _key(config.name, flow_run)), config)


def begin_run() -> RunRef:
    """Start or continue the run that the present flow run asks for; earlier flow runs of it that died are closed."""
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None
    request = request_of(context.flow_run)
    if request.config is None:
        ref = resume_run(request.run.root, request.run.run_key)
    else:
        ref = start_run(request.config, request.run.run_key)
    note(ref, flow_run=str(context.flow_run.id))
    _close_lost(ref)
    return ref


def _evaluation_of(source: str, config: RunConfig) -> RunConfig:
    """The configuration of a run that only evaluates a model on the same suites."""
    model = config.model.model_copy(update={"source": source, "init": "pretrained"})
    return config.model_copy(update={"name": f"{config.name}-evaluation", "model": model, "sft": None})


def _key(name: str, flow_run: FlowRun) -> str:
    """`name-<utc time>-<short id>`, the same whenever the flow run is retried."""
    assert flow_run.created is not None
    return f"{name}-{flow_run.created.strftime('%Y%m%d-%H%M%S')}-{flow_run.id.hex[-6:]}"


def _close_lost(ref: RunRef) -> None:
    """Mark flow runs as crashed whose process was killed: Prefect shows them as running for ever."""
    *earlier, present = read_record(opened(ref).store.folder)["attempts"]
    lost = {attempt["flow_run"] for attempt in earlier if attempt["status"] == LOST and "flow_run" in attempt}
    with get_client(sync_client=True) as client:
        for flow_run_id in lost - {present["flow_run"]}:
            _close(client, UUID(flow_run_id))


def _close(client: SyncPrefectClient, flow_run_id: UUID) -> None:
    try:
        state = client.read_flow_run(flow_run_id).state
    except ObjectNotFound:  # it ran under another server
        return
    if state is None or not state.is_final():
        client.set_flow_run_state(flow_run_id, Crashed(message="The process of this attempt was killed."), force=True)
