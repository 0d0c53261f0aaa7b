"""`hybridflow status` and `repair`: what the run directories say, without starting anything."""

import time
from pathlib import Path
from typing import Any

from engine.commands.outcome import Outcome
from engine.display import describe
from engine.errors import ConfigError, Problem, StoreError
from engine.lease import lease_of
from engine.runs import RECORD, read_record, run_folder, write_record
from engine.store import Store, step_path

_RUNNING, _LOST = "running", "lost"


def status(root: str, run_key: str | None) -> Outcome:
    """A table of all runs under a root, or everything about one."""
    if run_key is not None:
        return _one(root, run_key)
    rows = [_row(folder) for folder in _folders(root)]
    lines = [f"{'run':<44}{'status':<12}{'iterations':>12}  owner"] if rows else [f"no runs in {Path(root).absolute()}"]
    for row in rows:
        done = f"{row['iterations_done']}/{row['iterations_planned']}"
        lines.append(f"{row['run_key']:<44}{row['status']:<12}{done:>12}  {_owner(row['owner'])}")
    return Outcome({"status": "completed", "root": str(Path(root).absolute()), "runs": rows}, "\n".join(lines))


def repair(root: str) -> Outcome:
    """Close the attempts of processes that died, remove their drafts and leases; living ones are left alone."""
    rows = [{"run_key": folder.name, **_repair_one(folder)} for folder in _folders(root)]
    changed = [row for row in rows if row["repaired"]]
    lines = [f"{row['run_key']}: {row['repaired']}" for row in changed] or ["nothing to repair"]
    return Outcome({"status": "completed", "root": str(Path(root).absolute()), "runs": rows}, "\n".join(lines))


def _one(root: str, run_key: str) -> Outcome:
    folder = run_folder(root, run_key)
    if not (folder / RECORD).is_file():
        known = ", ".join(found.name for found in _folders(root)) or "none"
        problem = Problem("run_key", run_key, f"no such run in {Path(root).absolute()}; known: {known}")
        raise ConfigError("There is no run to show.", problems=[problem])
    row, record = _row(folder), read_record(folder)
    row |= {"attempts": record["attempts"], "metrics": _metrics(folder, record, row["iterations_done"])}
    lines = [
        f"{run_key}: {row['status']}, {row['iterations_done']} of {row['iterations_planned']} iterations",
        f"  owner: {_owner(row['owner'])}",
        f"  last iteration: {describe(row['metrics']) or 'no metrics'}",
    ]
    lines += [f"  attempt {number}: {_attempt(item)}" for number, item in enumerate(record["attempts"], start=1)]
    return Outcome(row, "\n".join([*lines, f"  folder: {folder}"]))


def _row(folder: Path) -> dict[str, Any]:
    """One run in the table; a run whose record is damaged does not hide the others."""
    row = {
        "run_key": folder.name,
        "run_dir": str(folder),
        "iterations_planned": None,
        "iterations_done": None,
        "owner": None,
    }
    try:
        record, owner = read_record(folder), lease_of(folder).owner()
    except StoreError as error:
        return row | {"status": "unreadable", "error": str(error)}
    latest = Store(folder, record["config_digest"]).latest("train")
    attempts = record["attempts"]
    state = attempts[-1]["status"] if attempts else "created"
    if state == _RUNNING and not (owner and owner["alive"]):
        state = _LOST
    done = latest[0] if latest else 0
    planned = record["config"]["iterations"]
    return row | {"status": state, "iterations_planned": planned, "iterations_done": done, "owner": owner}


def _metrics(folder: Path, record: dict[str, Any], iteration: int) -> dict[str, float]:
    store = Store(folder, record["config_digest"])
    steps = [store.committed(step_path(kind, iteration)) for kind in ("rollout", "train")]
    values = {name: value for ref in steps if ref for name, value in store.manifest(ref).metrics.items()}
    return {name: value for name, value in values.items() if value is not None}


def _repair_one(folder: Path) -> dict[str, Any]:
    """What was done to a run: {"repaired": text or None}."""
    try:
        record, owner = read_record(folder), lease_of(folder).owner()
    except StoreError as error:
        return {"repaired": None, "error": str(error)}
    if owner and owner["alive"]:
        return {"repaired": None, "error": f"in use by {_owner(owner)}"}
    dead = [attempt for attempt in record["attempts"] if attempt["status"] == _RUNNING]
    store = Store(folder, record["config_digest"])
    drafts = len(store.drafts())
    if owner is None and not dead and not drafts:
        return {"repaired": None}
    store.lease.acquire()
    try:
        store.remove_drafts()
        for attempt in dead:
            attempt |= {"status": _LOST, "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        write_record(folder, record)
    finally:
        store.lease.release()
    return {"repaired": f"{len(dead)} attempts closed, {drafts} drafts removed"}


def _folders(root: str) -> list[Path]:
    return sorted(file.parent.absolute() for file in Path(root).glob(f"*/{RECORD}"))


def _owner(owner: dict[str, Any] | None) -> str:
    if owner is None:
        return "nobody"
    return f"process {owner['pid']} on {owner['host']}{'' if owner['alive'] else ' (dead)'}"


def _attempt(attempt: dict[str, Any]) -> str:
    text = f"{attempt['started']} on {attempt['host']}, {attempt['status']}"
    return f"{text}: {attempt['error'].splitlines()[0]}" if attempt.get("error") else text
