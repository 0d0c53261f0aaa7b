"""`hybridflow doctor`: whether this machine and this installation can run anything, line by line."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from engine.commands.outcome import Outcome

_PYTHON = ((3, 11), (3, 13))  # from, below
_IMPORTED = ("torch", "transformers", "datasets", "ray", "prefect", "mlflow", "deepspeed", "vllm")
_BREAKS_TORCH = ("torchvision", "torchaudio", "torchcodec")  # where their build does not fit torch's
_IMPORT_TIMEOUT_S = 300.0
_GIB = 2**30
_MEMORY_GIB, _DISK_GIB, _SHARED_GIB = 8, 10, 1  # less than this is a problem


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and what to do if it is a problem."""

    what: str
    found: str
    remedy: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing has to be done."""
        return not self.remedy


def doctor() -> Outcome:
    """All findings; exit code 2 if one of them is a problem."""
    findings = [_python(), *_requirements(), *_imports(), *_machine()]
    problems = [finding for finding in findings if not finding.ok]
    lines = [f"{'ok     ' if item.ok else 'problem'} {item.what}: {item.found}{_advice(item)}" for item in findings]
    lines.append(f"{len(problems)} problems" if problems else "everything is fine")
    content = {
        "status": "failed" if problems else "completed",
        "findings": [{**asdict(item), "ok": item.ok} for item in findings],
    }
    return Outcome(content, "\n".join(lines), 2 if problems else 0)


def _python() -> Finding:
    fits = _PYTHON[0] <= sys.version_info[:2] < _PYTHON[1]
    return Finding("python", platform.python_version(), "" if fits else "use Python 3.11 or 3.12")


def _requirements() -> Iterator[Finding]:
    """Whether the installed versions are those that this package asks for."""
    try:
        wanted = importlib.metadata.requires("hybridflow") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("hybridflow", "not installed", "run make venv, or pip install -e .")
        return
    for requirement in map(Requirement, wanted):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(requirement.name, "not installed", f"pip install '{requirement}'")
            continue
        fits = requirement.specifier.contains(version, prereleases=True)
        yield Finding(requirement.name, version, "" if fits else f"pip install '{requirement}'")


def _imports() -> Iterator[Finding]:
    """Each heavy library in a process of its own, two at a time."""
    with ThreadPoolExecutor(2) as executor:
        yield from executor.map(_import_one, _IMPORTED)
    for name in _BREAKS_TORCH:
        if find_spec(name) is not None:
            found = _import_one(name)
            yield found if found.ok else Finding(found.what, found.found, f"remove it: pip uninstall {name}")


def _import_one(name: str) -> Finding:
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {name}"],
            capture_output=True,
            text=True,
            timeout=_IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding(f"import {name}", f"not done in {_IMPORT_TIMEOUT_S:.0f} s", "free the machine, or reinstall it")
    if done.returncode == 0:
        return Finding(f"import {name}", "works")
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return Finding(f"import {name}", last, f"reinstall {name} from the lock in requirements/")


def _machine() -> Iterator[Finding]:
    yield Finding("cpus", str(os.cpu_count()))
    yield Finding("gpus", _gpus())
    yield _room("memory", psutil.virtual_memory().available, _MEMORY_GIB, "free memory, or use a smaller model")
    here = Path.cwd()
    yield _room(f"disk {here}", shutil.disk_usage(here).free, _DISK_GIB, "make room, or run in another folder")
    shared = Path("/dev/shm")
    if shared.is_dir():
        yield _room("/dev/shm", shutil.disk_usage(shared).free, _SHARED_GIB, "give the container more: --shm-size=4g")
    else:
        yield Finding("/dev/shm", "missing", "mount it: weights are handed over there")


def _room(what: str, free: float, wanted: int, remedy: str) -> Finding:
    return Finding(what, f"{free / _GIB:.1f} GiB free", "" if free >= wanted * _GIB else remedy)


def _gpus() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "none"
    listed = subprocess.run(
        [program, "--query-gpu=name,memory.total", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return "; ".join(listed.stdout.strip().splitlines()) or "none"


def _advice(finding: Finding) -> str:
    return f" - {finding.remedy}" if finding.remedy else ""
