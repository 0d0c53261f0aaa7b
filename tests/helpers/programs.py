"""Python programs of a few lines that tests run in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HANG_S = 120.0
HOLD_LEASE = """
import os, sys
if len(sys.argv) > 2:
    os.environ["HYBRIDFLOW_CACHE"] = sys.argv[2]
from engine.remote_lease import lease_in
from engine.runs import run_folder
folder = run_folder(sys.argv[1], "run")
folder.mkdir(parents=True, exist_ok=True)
lease = lease_in(folder)
lease.acquire()
print("held", flush=True)
sys.stdin.read()
lease.release()
"""  # arguments: root, and a cache of its own


def start(code: str, *arguments: str, cwd: Path | None = None) -> "subprocess.Popen[str]":
    """The running program; our code can be imported in it."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
    )


def run(code: str, *arguments: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """The program once it has ended."""
    process = start(code, *arguments, cwd=cwd)
    out, err = process.communicate(timeout=HANG_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def wait_for(process: "subprocess.Popen[str]", word: str) -> str:
    """The first line of output, which must begin with `word`; what the program said instead is shown."""
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    assert line.startswith(word), f"{line!r} {process.stderr.read() if not line else ''}"
    return line
