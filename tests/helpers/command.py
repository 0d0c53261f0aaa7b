"""The `hybridflow` command as a user starts it: a process of its own, its output, its last line as JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SMOKE = ROOT / "deployments" / "presets" / "smoke.yaml"
SECONDS = 400  # no command of a tiny model takes longer, unless it hangs


def environment() -> dict[str, str]:
    """This environment without a Prefect or MLflow server of its own, and with no way out."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT", "MLFLOW", "RAY_"))}
    return own | {"HF_HUB_OFFLINE": "1", "HTTPS_PROXY": "http://127.0.0.1:9", "PYTHONPATH": str(ROOT)}


def start(*arguments: str, cwd: Path) -> "subprocess.Popen[str]":
    """`hybridflow ARGUMENTS`, running; its standard error goes to command.err in cwd."""
    command = [sys.executable, "-m", "engine.cli", *arguments]
    with (cwd / "command.err").open("a") as errors:
        return subprocess.Popen(command, cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=errors, text=True)


def hybridflow(*arguments: str, cwd: Path, code: int = 0) -> str:
    """Standard output of `hybridflow ARGUMENTS`, which must end with this exit code."""
    process = start(*arguments, cwd=cwd)
    try:
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == code, output[-2000:] + (cwd / "command.err").read_text()[-4000:]
    return output


def result_of(*arguments: str, cwd: Path, code: int = 0) -> dict[str, Any]:
    """The JSON object in the last line of `hybridflow ARGUMENTS --json`."""
    content: dict[str, Any] = json.loads(hybridflow(*arguments, "--json", cwd=cwd, code=code).splitlines()[-1])
    return content
