"""Repair of run directories: what processes that died left half done is closed and removed, without starting anything."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import HybridFlowError
from engine.remote_lease import lease_in
from engine.remote_store import run_folders as run_folders
from engine.remote_store import store_in
from engine.runs import read_record, write_record

RUNNING, LOST = "running", "lost"


@dataclass(frozen=True)
class Repair:
    """What was done to one run. flow_runs: Prefect ids of the attempts that died; obstacle: why nothing could be done."""

    run_key: str
    attempts: int = 0
    drafts: int = 0
    lease: bool = False
    flow_runs: tuple[str, ...] = ()
    obstacle: str | None = None

    @property
    def text(self) -> str | None:
        """What was done, in words; None = nothing had to be."""
        if not (self.attempts or self.drafts or self.lease):
            return None
        return f"{self.attempts} attempts closed, {self.drafts} drafts removed"


def repair_runs(root: str) -> list[Repair]:
    """Close the attempts of processes that died, remove their drafts and leases; living ones are left alone."""
    return [repair_run(folder) for folder in run_folders(root)]


def repair_run(folder: Path) -> Repair:
    """The same for one run."""
    try:
        record, owner = read_record(folder), lease_in(folder).owner()
    except HybridFlowError as error:
        return Repair(folder.name, obstacle=str(error))
    if owner and owner["alive"]:
        return Repair(folder.name, obstacle=f"in use by process {owner['pid']} on {owner['host']}")
    dead = [attempt for attempt in record["attempts"] if attempt["status"] == RUNNING]
    store = store_in(folder, record["config_digest"])
    drafts = len(store.drafts())
    if owner is None and not dead and not drafts:
        return Repair(folder.name)
    try:
        store.lease.acquire()
    except HybridFlowError as error:  # somebody was faster, or the storage is away
        return Repair(folder.name, obstacle=str(error))
    try:
        store.remove_drafts()
        record = read_record(folder)  # as it is now that nobody else writes it
        close_attempts(record)
        write_record(folder, record)
    finally:
        store.lease.release()
    flow_runs = tuple(attempt["flow_run"] for attempt in dead if "flow_run" in attempt)
    return Repair(folder.name, len(dead), drafts, owner is not None, flow_runs)


def close_attempts(record: dict[str, Any]) -> None:
    """Note in a record that is to be written that its running attempts died; only the lease holder may."""
    for attempt in record["attempts"]:
        if attempt["status"] == RUNNING:
            attempt |= {"status": LOST, "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
