"""Seconds from `hybridflow resume` to the first new tokens: a run is killed behind training steps and continued.

`python -m benchmarks.resume [--times 5]` uses the smoke preset. New tokens are seen when their experience is committed, so every
figure holds their generation and scoring as well, which are told beside it.
"""

import argparse
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from engine.runs import open_run
from engine.store import MANIFEST, step_path
from tests.helpers.command import SMOKE, start


def main() -> None:
    """Kill and continue one run, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    times = parser.parse_args().times
    with tempfile.TemporaryDirectory(prefix="resume-") as name:
        folder = Path(name)
        settings = ["--set", "registry=null", f"iterations={times + 2}", f"evaluation.every={times + 2}"]
        kill_behind(folder, 1, start("run", str(SMOKE), "--run-key", "run", *settings, cwd=folder))
        print("| iteration | s to its experience | of them generating and scoring |\n|---|---|---|")
        rows = [continued(folder, iteration) for iteration in range(2, times + 2)]
        for iteration, (seconds, work) in enumerate(rows, start=2):
            print(f"| {iteration} | {seconds:.1f} | {work:.1f} |")
        print(f"| median | {statistics.median(seconds for seconds, _ in rows):.1f} | |")


def continued(folder: Path, iteration: int) -> tuple[float, float]:
    """Seconds until the experience of an iteration was committed by `resume`, and those of the step itself."""
    began = time.time()
    kill_behind(folder, iteration, start("resume", "run", cwd=folder))
    store = open_run(str(folder / "runs"), "run").store
    step = store.committed(step_path("rollout", iteration))
    assert step is not None
    manifest = store.manifest(step)
    return manifest.committed_at - began, manifest.metrics["time/busy_s"] or 0.0


def kill_behind(folder: Path, iteration: int, process: "subprocess.Popen[str]") -> None:
    """End a command with SIGKILL once an iteration's training step is committed."""
    done = folder / "runs" / "run" / step_path("train", iteration) / MANIFEST
    while not done.exists():
        if process.poll() is not None:
            raise RuntimeError((folder / "command.err").read_text()[-2000:])
        time.sleep(0.005)
    process.kill()
    process.wait()


if __name__ == "__main__":
    main()
