"""`hybridflow run --dry-run`: what a run would do and need, and everything that stands in its way; nothing is started."""

import os
import shutil
from pathlib import Path

import psutil

from engine import environment
from engine.architecture import read_architecture
from engine.backends.imports import without
from engine.capacity import Capacity, Machine, capacity
from engine.checks import plan_steps
from engine.commands.outcome import Outcome
from engine.commands.running import check_no_objective
from engine.config import RunConfig
from engine.errors import Problem
from engine.loading import refused
from engine.preflight import (
    DataFindings,
    check_adapters,
    check_positions,
    described_machine,
    free_bytes,
    look_at_data,
    preflight_dry,
)
from engine.roots import local_root

_SHARED = Path("/dev/shm")


def dry_run(config_file: str, overrides: list[str], architecture: str | None) -> Outcome:
    """The plan of a run with its sizes, or one ConfigError with all problems.

    architecture: folder with the config.json to plan from, for another machine; None = the run's model, on this one.
    """
    check_no_objective(config_file)
    folder = Path(architecture) if architecture is not None else None
    with without("torch", "sklearn", "scipy"):
        config = preflight_dry(config_file, overrides, folder)
    if folder is None:
        environment.stay_offline(config)
        findings, sizes = _here(config)
    else:
        os.environ["HF_HUB_OFFLINE"] = "1"
        findings, sizes = _elsewhere(config, folder)
    problems = findings.check.problems + (sizes.problems if sizes else [])
    if problems:
        raise refused(problems)
    return _plan(config, findings, sizes)


def _here(config: RunConfig) -> tuple[DataFindings, Capacity | None]:
    from tasks.models import source_of
    from tasks.scoring_models import scoring_models

    source = source_of(config)
    findings = look_at_data(config, source)
    if findings.tokenizer is not None:
        scoring_models(config, findings.tokenizer)
    return findings, _sized(config, source, this_machine(config))


def _elsewhere(config: RunConfig, folder: Path) -> tuple[DataFindings, Capacity | None]:
    """Prompt lengths are checked only if the folder holds a tokenizer."""
    machine = described_machine(config)
    if machine.gpu_bytes is None:
        remedy = "say how many GiB a device of the machine has that the run is planned for"
        raise refused([Problem("placement.device_memory_gib", None, remedy)])
    tokenizer = (folder / "tokenizer_config.json").is_file()
    findings = look_at_data(config, folder if tokenizer else None)
    if not tokenizer:
        findings.check.problems.extend([*check_positions(config, folder), *check_adapters(config, folder)])
    return findings, _sized(config, folder, machine)


def _sized(config: RunConfig, folder: Path, machine: Machine) -> Capacity | None:
    shapes = read_architecture(folder)
    return None if shapes is None else capacity(config, shapes, machine)


def this_machine(config: RunConfig) -> Machine:
    """GPUs as stated or as found here; without any, main memory, unless the run goes to a cluster. Free disk and shared
    memory of this machine."""
    from engine.backends.device import gpu_bytes

    stated = described_machine(config).gpu_bytes
    gpu = stated if stated is not None else gpu_bytes()
    alone = gpu is None and "RAY_ADDRESS" not in os.environ
    return Machine(
        gpu_bytes=gpu,
        ram_bytes=psutil.virtual_memory().total if alone else None,
        disk_bytes=free_bytes(local_root(config.root)),
        shared_bytes=shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else None,
    )


def _plan(config: RunConfig, findings: DataFindings, sizes: Capacity | None) -> Outcome:
    rows = {"train_rows": len(findings.prepared.train), "eval_rows": len(findings.prepared.eval)}
    plan = rows | plan_steps(config)
    content = {
        "status": "planned",
        "name": config.name,
        "root": config.root,
        "plan": plan,
        "prompt_tokens": findings.check.report.to_json()["prompt_tokens"],
        "sizes": sizes.report if sizes else None,
    }
    lines = [f"{config.name}: nothing was started.", *(f"  {name:<24}{value:>12,}" for name, value in plan.items())]
    lines += sizes.lines if sizes else ["  sizes: not known for this type of model"]
    return Outcome(content, "\n".join(lines))
