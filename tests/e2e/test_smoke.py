"""The command, from YAML to registered model, with everything real; and what happens when it is killed or interrupted."""

import json
import math
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.controller.ray_group import RUN_TAG
from engine.store import MANIFEST
from tests.helpers.command import SECONDS, SMOKE, result_of, start

pytestmark = pytest.mark.timeout(900)
KEYS = {
    "status", "run_key", "run_dir", "iterations_planned", "iterations_done", "iterations_reused", "seconds",
    "weights_sha256", "metrics", "evaluation", "gate", "model",
}  # fmt: skip


def test_a_run_reports_everything_it_promises(smoke_result: dict[str, Any]) -> None:
    assert smoke_result.keys() >= KEYS
    assert smoke_result["status"] == "completed"
    assert smoke_result["iterations_done"] == smoke_result["iterations_planned"] == 3
    assert smoke_result["iterations_reused"] == 0
    suite = smoke_result["evaluation"]["held_out"]
    assert suite["rows"] == 16
    assert 0.0 <= suite["score_mean"] <= 1.0 and 0.0 <= suite["baseline_score_mean"] <= 1.0
    assert smoke_result["model"] == {"name": "smoke", "version": 1, "aliases": ["challenger", "champion"]}
    assert smoke_result["metrics"]["rollout/logprob_gap_max"] < 1e-3
    assert math.isfinite(smoke_result["metrics"]["train/grad_norm"])


def test_resuming_a_finished_run_does_nothing_again(smoke_result: dict[str, Any], smoke_folder: Path) -> None:
    before = manifests(smoke_folder / "runs" / "smoke-1")
    again = result_of("resume", "smoke-1", cwd=smoke_folder)
    assert again["iterations_reused"] == 3
    assert again["weights_sha256"] == smoke_result["weights_sha256"]
    assert again["model"] == smoke_result["model"]
    assert manifests(smoke_folder / "runs" / "smoke-1") == before


def test_a_run_that_is_ended_again_and_again_ends_with_the_same_weights(
    smoke_result: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "ended"
    command = ["run", str(SMOKE), "--run-key", "ended"]
    endings = {
        "start": signal.SIGKILL,
        "iterations/00001/train": signal.SIGINT,
        "iterations/00002/train": signal.SIGTERM,
    }
    before: dict[str, str] = {}
    for step, how in endings.items():
        process = start(*command, "--json", cwd=tmp_path)
        wait_for(folder / step / MANIFEST, process)
        process.send_signal(how)
        output, _ = process.communicate(timeout=SECONDS)
        if how is not signal.SIGKILL:
            assert process.returncode == 130, how
            assert json.loads(output.splitlines()[-1])["status"] == "cancelled", how
        wait_until_gone("ended", seconds=20)
        assert manifests(folder).items() >= before.items(), how
        before = manifests(folder)
        command = ["resume", "ended"]

    result = result_of("resume", "ended", cwd=tmp_path)
    assert result["status"] == "completed"
    assert result["iterations_reused"] >= 2
    assert result["weights_sha256"] == smoke_result["weights_sha256"]
    assert manifests(folder).items() >= before.items()


def manifests(folder: Path) -> dict[str, str]:
    """Content of every committed manifest of a run."""
    return {str(file.relative_to(folder)): file.read_text() for file in sorted(folder.rglob(MANIFEST))}


def wait_for(file: Path, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + SECONDS
    while not file.exists():
        assert process.poll() is None, "the run ended before it could be ended"
        assert time.monotonic() < deadline, f"{file} did not appear"
        time.sleep(0.05)


def wait_until_gone(run_key: str, seconds: float) -> None:
    """No process of the run is left: neither workers, which carry its tag, nor anything that stands in its folder."""
    deadline = time.monotonic() + seconds
    while left := [process for process in psutil.process_iter() if belongs(process, run_key)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def belongs(process: psutil.Process, run_key: str) -> bool:
    try:
        tagged = process.environ().get(RUN_TAG) == run_key
        return process.pid != os.getpid() and tagged and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
