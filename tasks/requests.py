"""Which run a flow run works on: named by its key, or made from a configuration under a key that a retry finds again."""

from dataclasses import dataclass
from typing import Any

from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext

from engine.config import RunConfig
from engine.errors import ConfigError, Problem
from engine.loading import load_config
from engine.offline_loading import is_offline, load_offline
from engine.offlineconfig import AnyConfig, OfflineConfig
from engine.repair import LOST
from engine.roots import absolute_root
from engine.runs import open_run, read_record
from tasks.attempts import note, resume_run
from tasks.data import plan_run, start_planned, start_run
from tasks.mlflow_store import address
from tasks.offline_data import start_offline_run
from tasks.overlap import cancel_earlier
from tasks.refs import RunRef, opened
from tasks.registered import Registered, registered_before
from tasks.zombies import close_flow_runs

DEFAULT_ROOT = "runs"
_DEFAULTS: dict[str, Any] = {  # of flow parameters that a deployment leaves out
    "config": None,
    "overrides": [],
    "run_key": None,
    "root": None,
    "skip_if_registered": False,
    "cancel_earlier": False,
}


@dataclass(frozen=True)
class Request:
    """What a flow's parameters ask for; config is None where a recorded run is continued as it is."""

    run: RunRef
    config: AnyConfig | None
    skip_if_registered: bool = False
    cancel_earlier: bool = False


def request_of(flow_run: FlowRun) -> Request:
    """The run that a flow run's parameters name. Raises ConfigError if they name none."""
    given: dict[str, Any] = _DEFAULTS | flow_run.parameters
    overlap = given["cancel_earlier"]
    if given["config"] is None:
        if given["run_key"] is None:
            remedy = "give config, or the run_key of an existing run"
            raise ConfigError("There is nothing to run.", problems=[Problem("config", None, remedy)])
        root = absolute_root(given["root"] or DEFAULT_ROOT)
        return Request(RunRef(root, given["run_key"]), None, cancel_earlier=overlap)
    load = load_offline if is_offline(given["config"]) else load_config
    config: AnyConfig = load(given["config"], given["overrides"])
    if given["root"] is not None:
        config = config.model_copy(update={"root": given["root"]})
        if config.registry is not None:
            address(config.root, config.registry.tracking_uri)  # of a URL it has to be given
    if "source" in given:
        if isinstance(config, OfflineConfig):
            remedy = "only models that answer prompts are evaluated on suites; give the configuration of an rlhf run"
            raise ConfigError(
                "Nothing can be evaluated.", problems=[Problem("objective", config.objective.name, remedy)]
            )
        config = _evaluation_of(given["source"], config)
    ref = RunRef(absolute_root(config.root), given["run_key"] or _key(config.name, flow_run))
    return Request(ref, config, given["skip_if_registered"], overlap)


def begin_run() -> RunRef:
    """Start or continue the run that the present flow run asks for; earlier flow runs of it that died are closed."""
    flow_run, request = _asked()
    if request.config is None:
        ref = resume_run(request.run.root, request.run.run_key)
    elif isinstance(request.config, OfflineConfig):
        raise _other_flow("objective", request.config.objective.name, "use the flow of this objective")
    else:
        ref = start_run(request.config, request.run.run_key)
    return _begun(ref, flow_run)


def begin_offline_run(objectives: tuple[str, ...]) -> RunRef:
    """The same for a run on fixed rows. Raises ConfigError for one of another objective."""
    flow_run, request = _asked()
    if request.config is None:
        config = open_run(request.run.root, request.run.run_key).config
    else:
        config = request.config
    check_objective(config, objectives)
    if request.config is None:
        ref = resume_run(request.run.root, request.run.run_key)
    else:
        assert isinstance(config, OfflineConfig)
        ref = start_offline_run(config, request.run.run_key)
    return _begun(ref, flow_run)


def check_objective(config: AnyConfig, objectives: tuple[str, ...]) -> None:
    """Raises ConfigError unless a run has one of these objectives."""
    found = config.objective.name if isinstance(config, OfflineConfig) else None
    if found not in objectives:
        raise _other_flow("objective.name", found, f"this takes {' and '.join(objectives)}")


def _other_flow(key: str, value: str | None, remedy: str) -> ConfigError:
    return ConfigError("The configuration is one for another flow.", problems=[Problem(key, value, remedy)])


def _asked() -> tuple[FlowRun, Request]:
    flow_run = _present()
    return flow_run, request_of(flow_run)


def begin_unless_registered() -> RunRef | Registered:
    """As `begin_run`, after what the flow run asks for besides: earlier ones of its deployment are cancelled, and where
    another run with the same result has been registered, that version is returned instead."""
    flow_run, request = _asked()
    if request.cancel_earlier:
        cancel_earlier(flow_run)
    if not isinstance(request.config, RunConfig) or not request.skip_if_registered:
        return begin_run()
    plan = plan_run(request.config)
    if found := registered_before(request.config, plan.digest, request.run.run_key):
        return found
    return _begun(start_planned(plan, request.run.run_key), flow_run)


def _begun(ref: RunRef, flow_run: FlowRun) -> RunRef:
    note(ref, flow_run=str(flow_run.id))
    _close_lost(ref)
    return ref


def _present() -> FlowRun:
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None
    return context.flow_run


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
    close_flow_runs(lost - {present["flow_run"]})
