"""Leftovers are swept when they are nobody's: half-filled model folders, weights in shared memory of runs that ended."""

import os
import time
from pathlib import Path

import pytest

from engine import leftovers
from engine.lease import lease_of
from engine.repair import repair_run

HOUR = 3600.0


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the machine's shared memory."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(leftovers, "exchange_parent", lambda: folder)
    return folder


def folder(path: Path, hours: float = 10.0) -> Path:
    """A folder with a file, last written this long ago."""
    path.mkdir(parents=True)
    (path / "file").write_text("x")
    then = time.time() - hours * HOUR
    for item in (path / "file", path):
        os.utime(item, (then, then))
    return path


def run(root: Path, key: str) -> Path:
    (root / key).mkdir(parents=True)
    (root / key / "run.json").write_text("{}")
    return root / key


def test_half_filled_model_folders_are_removed_once_they_are_old(tmp_path: Path, shared: Path):
    models = tmp_path / "runs" / ".models"
    old, young = folder(models / ".llama-0123abcd"), folder(models / ".qwen-0123abcd", hours=1.0)
    complete, hidden = folder(models / "registered-sums-1-abc"), folder(models / ".locks")
    assert leftovers.sweep(str(tmp_path / "runs")) == [old]
    assert not old.exists() and young.exists() and complete.exists() and hidden.exists()


def test_weights_in_shared_memory_go_with_their_run(tmp_path: Path, shared: Path):
    root = tmp_path / "runs"
    for key in ("ended", "living"):
        run(root, key)
    lease_of(root / "living").acquire()
    ended, living, foreign = (folder(shared / f"hybridflow-{key}") for key in ("ended", "living", "elsewhere"))
    young = folder(shared / "hybridflow-young", hours=1.0)
    run(root, "young")
    assert leftovers.sweep(str(root)) == [ended]
    assert not ended.exists() and living.exists() and foreign.exists() and young.exists()


def test_a_lease_that_cannot_be_read_may_be_anybodys(tmp_path: Path, shared: Path):
    (run(tmp_path, "odd") / "OWNER").write_text("{")
    kept = folder(shared / "hybridflow-odd")
    assert leftovers.sweep(str(tmp_path)) == [] and kept.exists()


def test_a_run_whose_record_is_damaged_is_reported_and_left_alone(tmp_path: Path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    done = repair_run(tmp_path / "broken")
    assert done.text is None and "does not parse" in str(done.obstacle)
