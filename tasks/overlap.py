"""Flow runs of one deployment that overlap: the newest one may end those that were made before it.

To skip or to queue the newer one is Prefect's own choice (`concurrency_limit` with a collision strategy in prefect.yaml).
"""

import logging
import time
from uuid import UUID

from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId, FlowRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelling

from engine.errors import TransientError

log = logging.getLogger(__name__)
TIMEOUT_S = 120.0  # for those that were cancelled to end
_ASK_S = 0.5


def cancel_earlier(present: FlowRun, timeout_s: float = TIMEOUT_S) -> list[UUID]:
    """Cancel the unfinished flow runs of the same deployment that were made earlier; returns them once they have ended.

    Raises TransientError if one does not end. A flow run without a deployment has no earlier ones.
    """
    if present.deployment_id is None:
        return []
    with get_client(sync_client=True) as client:
        earlier = _unfinished(client, present)
        for flow_run in earlier:
            log.warning("Flow run %s is cancelled: %s replaces it.", flow_run.name, present.name)
            client.set_flow_run_state(flow_run.id, Cancelling(message=f"{present.name} replaces it."))
        deadline = time.monotonic() + timeout_s
        while left := _unfinished(client, present):
            if time.monotonic() > deadline:
                names = ", ".join(flow_run.name for flow_run in left)
                raise TransientError(
                    f"{names} did not end within {timeout_s:.0f} s of being cancelled.", remedy="Is its worker alive?"
                )
            time.sleep(_ASK_S)
    return [flow_run.id for flow_run in earlier]


def _unfinished(client: SyncPrefectClient, present: FlowRun) -> list[FlowRun]:
    assert present.deployment_id is not None and present.created is not None
    same = DeploymentFilter(id=DeploymentFilterId(any_=[present.deployment_id]))
    found = client.read_flow_runs(flow_run_filter=FlowRunFilter(), deployment_filter=same)
    return [
        flow_run
        for flow_run in found
        if flow_run.created is not None
        and flow_run.created < present.created
        and (flow_run.state is None or not flow_run.state.is_final())
    ]
