"""What keeps a folder of runs in order: dead attempts closed, weights pruned, leftovers swept. Safe to repeat at any time."""

from typing import Any

from prefect import task
from prefect.artifacts import create_table_artifact

from engine import leftovers, repair
from engine.errors import HybridFlowError
from engine.retention import apply_retention
from engine.runs import open_run
from tasks.zombies import close_flow_runs


@task
def repair_runs(root: str) -> dict[str, str]:
    """Close the attempts of processes that died, here and in Prefect; run key -> what was done, or why nothing could be."""
    repairs = repair.repair_runs(root)
    close_flow_runs([flow_run for done in repairs for flow_run in done.flow_runs])
    return {done.run_key: text for done in repairs if (text := done.text or done.obstacle)}


@task
def prune_runs(root: str) -> dict[str, str]:
    """Apply every run's own retention where nobody works on it; run key -> what was removed, or why nothing could be."""
    report = {folder.name: _pruned(root, folder.name) for folder in repair.run_folders(root)}
    return {run_key: text for run_key, text in report.items() if text}


@task
def sweep_leftovers(root: str) -> list[str]:
    """Remove half-filled model folders and weights in shared memory that no process works on; returns their paths."""
    return [str(folder) for folder in leftovers.sweep(root)]


def maintenance_report(root: str, repaired: dict[str, str], pruned: dict[str, str], swept: list[str]) -> dict[str, Any]:
    """The result of the flow, also as a table on its page."""
    rows = [{"what": "repair", "where": run_key, "result": text} for run_key, text in repaired.items()]
    rows += [{"what": "retention", "where": run_key, "result": text} for run_key, text in pruned.items()]
    rows += [{"what": "sweep", "where": path, "result": "removed"} for path in swept]
    create_table_artifact(table=rows, key="maintenance", description=f"What was put in order under {root}")
    return {"status": "completed", "root": root, "repaired": repaired, "pruned": pruned, "swept": swept}


def _pruned(root: str, run_key: str) -> str | None:
    try:
        run = open_run(root, run_key)
        newest = run.store.latest("train")
        owner = run.store.lease.owner()
        if newest is None or (owner and owner["alive"]):
            return None
        run.store.lease.acquire()
        try:
            gone = apply_retention(run.store, newest[0], run.config.checkpoint, run.config.gate.suite)
        finally:
            run.store.lease.release()
    except HybridFlowError as error:
        return str(error)
    return f"weights of iterations {', '.join(map(str, gone))} removed" if gone else None
