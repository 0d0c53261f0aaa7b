"""Flow runs whose process was killed: Prefect shows them as running, and counts them as running, until somebody says so."""

from collections.abc import Collection
from uuid import UUID

from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed


def close_flow_runs(flow_runs: Collection[str]) -> None:
    """Mark these flow runs as crashed unless they have ended; ids of another server are passed over."""
    if not flow_runs:
        return
    with get_client(sync_client=True) as client:
        for flow_run in flow_runs:
            _close(client, UUID(flow_run))


def _close(client: SyncPrefectClient, flow_run_id: UUID) -> None:
    try:
        state = client.read_flow_run(flow_run_id).state
    except ObjectNotFound:
        return
    if state is None or not state.is_final():
        client.set_flow_run_state(flow_run_id, Crashed(message="The process of this attempt was killed."), force=True)
