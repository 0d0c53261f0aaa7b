"""What the deployments need on a Prefect server: work pool, queue with its limit, secrets, the automation against zombies.

    python -m deployments.bootstrap                  # before `prefect deploy --all`; harmless to repeat
    HYBRIDFLOW_SECRET_SCORER_TOKEN=... python -m deployments.bootstrap

Every environment variable HYBRIDFLOW_SECRET_NAME becomes the Secret block hybridflow-name, and the pool gives its value to
flow runs as the environment variable NAME. The value itself stands in no file, parameter or job template.
"""

import os
import sys
from datetime import timedelta

from prefect import get_client
from prefect.blocks.system import Secret
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.workers.process import ProcessWorker

POOL, QUEUE = "hybridflow", "training"
RUNS_AT_ONCE = 1  # flow runs of the queue: they share the machine's processors
SECRET = "HYBRIDFLOW_SECRET_"
HEARTBEAT_S, SILENT_S = 30, 90  # how often a flow run is heard of, and after how long without it counts as dead
ZOMBIES = "hybridflow: flow runs that fell silent are crashed"
_BEAT = "prefect.flow-run.heartbeat"
_ENDED = ("Completed", "Failed", "Cancelled", "Crashed")


def bootstrap(secrets: dict[str, str], runs_at_once: int = RUNS_AT_ONCE, silent_s: int = SILENT_S) -> list[str]:
    """Make or update everything; returns what there is now, for people. secrets: environment variable -> value."""
    for name, value in secrets.items():
        Secret(value=value).save(block_name(name), overwrite=True)  # type: ignore[arg-type]
    with get_client(sync_client=True) as client:
        given = _pool(client, secrets)
        _queue(client, runs_at_once)
        _zombies(client, silent_s)
    lines = [f"work pool {POOL}, queue {QUEUE} of {runs_at_once} at once", f"automation {ZOMBIES!r} after {silent_s} s"]
    return [*lines, *(f"secret {name} from block {block_name(name)}" for name in given)]


def block_name(variable: str) -> str:
    """Name of the block that holds the value of an environment variable; Prefect takes letters, digits and dashes."""
    return f"hybridflow-{variable.lower().replace('_', '-')}"


def _pool(client: SyncPrefectClient, secrets: dict[str, str]) -> list[str]:
    """Make the pool, or add secrets to the one that is there; returns the variables that it gives to flow runs."""
    try:
        template = client.read_work_pool(POOL).base_job_template
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=template))
    environment = template["variables"]["properties"]["env"]
    given = {name: f"{{{{ prefect.blocks.secret.{block_name(name)} }}}}" for name in secrets}
    beats = {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S)}
    environment["default"] = environment.get("default", {}) | beats | given
    client.update_work_pool(POOL, WorkPoolUpdate(base_job_template=template))
    return sorted(environment["default"].keys() - beats.keys())


def _queue(client: SyncPrefectClient, runs_at_once: int) -> None:
    try:
        client.create_work_queue(QUEUE, concurrency_limit=runs_at_once, work_pool_name=POOL)
    except ObjectAlreadyExists:
        queue = client.read_work_queue_by_name(QUEUE, work_pool_name=POOL)
        client.update_work_queue(queue.id, concurrency_limit=runs_at_once)


def _zombies(client: SyncPrefectClient, silent_s: int) -> None:
    """Whoever was heard of once must be heard of again, or end; a slow flow run keeps beating and is left alone."""
    wanted = AutomationCore(
        name=ZOMBIES,
        trigger=EventTrigger(
            after={_BEAT},
            expect={_BEAT, *(f"prefect.flow-run.{state}" for state in _ENDED)},
            match={"prefect.resource.id": ["prefect.flow-run.*"]},  # type: ignore[arg-type]
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=silent_s),
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message=f"Nothing was heard of it for {silent_s} s.")],
    )
    present = client.read_automations_by_name(ZOMBIES)
    if present:
        client.update_automation(present[0].id, wanted)
    else:
        client.create_automation(wanted)


if __name__ == "__main__":
    named = {name.removeprefix(SECRET): value for name, value in os.environ.items() if name.startswith(SECRET)}
    sys.stdout.write("\n".join(bootstrap(named)) + "\n")
