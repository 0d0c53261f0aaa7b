"""`hybridflow run` with a root on object storage: killed on one machine, continued on another that has nothing of it."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from engine.remote import Place
from engine.store import MANIFEST
from tests.helpers.command import SECONDS, SMOKE, hybridflow, result_of, start
from tests.helpers.storage import Storage

pytestmark = pytest.mark.timeout(900)
LIGHT = ("placement.mode=local", "train.backend=torch", "rollout.backend=hf")


def settings(folder: Path, *more: str) -> list[str]:
    registry = f"registry.tracking_uri=sqlite:///{folder / 'mlflow.db'}"
    return ["--set", *LIGHT, registry, *more]


def test_a_killed_run_is_continued_on_another_machine_and_ends_like_one_that_was_not(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = result_of("run", str(SMOKE), "--run-key", "whole", *settings(tmp_path), cwd=tmp_path)
    root = storage.new_root()
    place = Place(f"{root}/killed")

    monkeypatch.setenv("HYBRIDFLOW_CACHE", str(tmp_path / "first"))
    process = start("run", str(SMOKE), "--run-key", "killed", *settings(tmp_path, f"root={root}"), cwd=tmp_path)
    wait_for(place, f"iterations/00001/train/{MANIFEST}", process)
    process.send_signal(signal.SIGKILL)
    process.wait(SECONDS)
    assert place.read("report.json") is None
    before = steps_at(place)

    monkeypatch.setenv("HYBRIDFLOW_CACHE", str(tmp_path / "second"))
    shown = json.loads(hybridflow("status", "--root", root, "--json", cwd=tmp_path).splitlines()[-1])
    trained = len([name for name in before if name.endswith(f"/train/{MANIFEST}")])
    assert [run["iterations_done"] for run in shown["runs"]] == [trained]
    assert shown["root"] == root and shown["runs"][0]["status"] == "lost"
    done = result_of("resume", "killed", "--root", root, cwd=tmp_path)

    assert (done["status"], done["iterations_done"]) == ("completed", 3) and done["iterations_reused"] >= 1
    assert done["weights_sha256"] == whole["weights_sha256"]
    assert done["evaluation"]["held_out"]["score_mean"] == whole["evaluation"]["held_out"]["score_mean"]
    assert {name: text for name, text in steps_at(place).items() if name in before} == before, "made twice"
    record = json.loads(place.read("run.json") or b"")
    assert [attempt["status"] for attempt in record["attempts"]] == ["lost", "completed"]
    assert record["config"]["root"] == root and json.loads(place.read("report.json") or b"")["status"] == "completed"


def test_what_cannot_work_ends_at_once_with_exit_code_2(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRIDFLOW_CACHE", str(tmp_path / "cache"))
    nowhere = settings(tmp_path, "root=s3://nowhere/runs")
    refused = result_of("run", str(SMOKE), *nowhere, cwd=tmp_path, code=2)
    assert "bucket does not exist" in refused["error"]["message"]
    root = storage.new_root()
    unregistered = result_of("run", str(SMOKE), "--set", *LIGHT, f"root={root}", cwd=tmp_path, code=2)
    assert "registry.tracking_uri" in unregistered["error"]["message"]
    unknown = result_of("resume", "none", "--root", root, cwd=tmp_path, code=2)
    assert f"no such run in {root}; known: none" in unknown["error"]["message"]
    assert not (tmp_path / "cache").exists()


def steps_at(place: Place) -> dict[str, bytes]:
    """Manifests at the storage, by name."""
    return place.read_all([name for name in place.sizes() if name.endswith(MANIFEST)])


def wait_for(place: Place, name: str, process: Any) -> None:
    deadline = time.monotonic() + SECONDS
    while place.read(name) is None:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
