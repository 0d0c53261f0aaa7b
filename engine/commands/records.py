"""`hybridflow status`: what the run directories say, without starting anything."""

import sys
import time
from pathlib import Path
from typing import Any

from engine.commands.outcome import Outcome
from engine.display import describe, duration
from engine.errors import ConfigError, HybridFlowError, Problem
from engine.outlook import outlook, seconds_left
from engine.remote_lease import lease_in
from engine.remote_store import bring_run, run_folders, store_in
from engine.repair import LOST, RUNNING
from engine.roots import absolute_root
from engine.runs import planned_of, read_record, run_folder
from engine.store import Store, step_path

_COLUMNS = "{:<44}{:<11}{:>11}  {:<25}{:>8}{:>10}{:>8}  {}"
_HEADER = _COLUMNS.format("run", "status", "iterations", "next step", "attempts", "tokens/s", "left", "owner")
_CLEAR = "\x1b[H\x1b[2J"  # of a terminal
_UNKNOWN = (  # as long as the record could not be read
    "iterations_planned",
    "iterations_done",
    "next_step",
    "attempts_made",
    "error",
    "tokens_per_s",
    "seconds_left",
    "owner",
)


def status(root: str, run_key: str | None) -> Outcome:
    """A table of all runs under a root, or everything about one."""
    if run_key is not None:
        return _one(root, run_key)
    rows = [_row(folder) for folder in run_folders(root)]
    lines = [_HEADER, *map(_line, rows)] if rows else [f"no runs in {absolute_root(root)}"]
    return Outcome({"status": "completed", "root": absolute_root(root), "runs": rows}, "\n".join(lines))


def watch(root: str, run_key: str | None, every_s: float) -> Outcome:
    """The same again and again, in place on a terminal, as long as somebody works on one of the runs, or until Ctrl-C."""
    clear = _CLEAR if sys.stderr.isatty() else ""
    shown = status(root, run_key)
    try:
        while _any_alive(shown):
            print(f"{clear}{shown.text}", file=sys.stderr, flush=True)
            time.sleep(every_s)
            shown = status(root, run_key)
    except KeyboardInterrupt:  # the way to end watching
        pass
    return shown


def _any_alive(shown: Outcome) -> bool:
    rows = shown.content.get("runs", [shown.content])
    return any(row["owner"] and row["owner"]["alive"] for row in rows)


def _one(root: str, run_key: str) -> Outcome:
    folder = run_folder(root, run_key)
    if not bring_run(folder):
        known = ", ".join(found.name for found in run_folders(root)) or "none"
        problem = Problem("run_key", run_key, f"no such run in {absolute_root(root)}; known: {known}")
        raise ConfigError("There is no run to show.", problems=[problem])
    row, record = _row(folder), read_record(folder)
    row |= {"attempts": record["attempts"], "metrics": _metrics(_opened(folder, record), row["iterations_done"])}
    lines = [
        f"{run_key}: {row['status']}, {row['iterations_done']} of {row['iterations_planned']} iterations",
        f"  owner: {_owner(row['owner'])}",
        f"  {row['plan']}",
        f"  last iteration: {describe(row['metrics']) or 'no metrics'}",
    ]
    if row["seconds_left"] is not None:
        lines.append(f"  {duration(row['seconds_left'])} left at the pace of the last iterations")
    lines += [f"  attempt {number}: {_attempt(item)}" for number, item in enumerate(record["attempts"], start=1)]
    return Outcome(row, "\n".join([*lines, f"  folder: {folder}"]))


def _row(folder: Path) -> dict[str, Any]:
    """One run in the table; a run whose record is damaged does not hide the others."""
    row: dict[str, Any] = {"run_key": folder.name, "run_dir": str(folder)} | dict.fromkeys(_UNKNOWN)
    try:
        record, owner = read_record(folder), lease_in(folder).owner()
        store, attempts = _opened(folder, record), record["attempts"]
        latest, ahead = store.latest("train"), outlook(store, record["config"])
    except HybridFlowError as error:
        return row | {"status": "unreadable", "error": str(error)}
    done, planned = latest[0] if latest else 0, planned_of(record)
    alive = bool(owner and owner["alive"])
    return row | {
        "status": _state(attempts, alive),
        "iterations_planned": planned,
        "iterations_done": done,
        "next_step": ahead.next,
        "plan": ahead.text,
        "attempts_made": len(attempts),
        "error": None if alive or not attempts else attempts[-1].get("error"),
        "tokens_per_s": _metrics(store, done).get("rollout/tokens_per_s"),
        "seconds_left": seconds_left(store, done, planned) if alive else None,
        "owner": owner,
    }


def _state(attempts: list[dict[str, Any]], alive: bool) -> str:
    state = attempts[-1]["status"] if attempts else "created"
    return LOST if state == RUNNING and not alive else str(state)


def _opened(folder: Path, record: dict[str, Any]) -> Store:
    return store_in(folder, record["config_digest"])


def _metrics(store: Store, iteration: int) -> dict[str, float]:
    steps = [store.committed(step_path(kind, iteration)) for kind in ("rollout", "train")]
    values = {name: value for ref in steps if ref for name, value in store.manifest(ref).metrics.items()}
    return {name: value for name, value in values.items() if value is not None}


def _line(row: dict[str, Any]) -> str:
    """A run in the table, with the last error of one that nobody works on below it."""
    done = f"{row['iterations_done']}/{row['iterations_planned']}" if row["iterations_planned"] else ""
    speed = "" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:,.0f}"
    left = "" if row["seconds_left"] is None else duration(row["seconds_left"])
    cells = (row["next_step"] or "", row["attempts_made"] or "", speed, left)
    line = _COLUMNS.format(row["run_key"], row["status"], done, *cells, _owner(row["owner"]))
    return f"{line}\n    {row['error'].splitlines()[0]}" if row["error"] else line


def _owner(owner: dict[str, Any] | None) -> str:
    if owner is None:
        return "nobody"
    return f"process {owner['pid']} on {owner['host']}{'' if owner['alive'] else ' (dead)'}"


def _attempt(attempt: dict[str, Any]) -> str:
    text = f"{attempt['started']} on {attempt['host']}, {attempt['status']}"
    return f"{text}: {attempt['error'].splitlines()[0]}" if attempt.get("error") else text
