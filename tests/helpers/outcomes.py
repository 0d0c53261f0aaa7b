"""What must be equal between two runs of one configuration, however often one of them was disturbed."""

from pathlib import Path
from typing import Any

from engine.metrics import OF_THE_MACHINE
from engine.runs import open_run
from engine.store import Manifest, Store, step_path

SAMPLES = ("experience.safetensors", "samples.parquet")


def outcome(root: Path, run_key: str) -> dict[str, Any]:
    """Step -> sha256 of its weights, optimiser states and samples, and all of its metrics that are no times."""
    run = open_run(str(root), run_key)
    found = {}
    for iteration in range(1, run.config.iterations + 1):
        for kind in ("rollout", "train", "evaluation"):
            if manifest := _manifest(run.store, step_path(kind, iteration)):
                found[manifest.path] = _essence(manifest)
    return found


def _manifest(store: Store, path: str) -> Manifest | None:
    ref = store.committed(path)
    return store.manifest(ref) if ref else None


def _essence(manifest: Manifest) -> dict[str, Any]:
    files = {
        name: entry["sha256"]
        for name, entry in manifest.files.items()
        if name in SAMPLES or name.endswith(".safetensors")
    }
    metrics = {name: value for name, value in manifest.metrics.items() if not _is_a_time(name)}
    facts = {name: manifest.facts.get(name) for name in ("sha256", "steps", "controllers", "suites", "samples")}
    return {"files": files, "metrics": metrics, "facts": facts}


def _is_a_time(metric: str) -> bool:
    return metric.startswith(OF_THE_MACHINE) or metric.endswith("_per_s")
