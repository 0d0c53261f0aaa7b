"""Maintenance of a folder of runs: repair, retention, leftovers. Meant to be run every hour, beside the runs themselves."""

from typing import Any

from prefect import flow

from tasks.maintenance import maintenance_report, prune_runs, repair_runs, sweep_leftovers


@flow(name="maintenance")
def maintenance(root: str = "runs") -> dict[str, Any]:
    """Put the runs under a root in order; returns what was repaired, pruned and swept. Living runs are left alone."""
    repaired = repair_runs(root)
    pruned = prune_runs(root)
    swept = sweep_leftovers(root)
    return maintenance_report(root, repaired, pruned, swept)
