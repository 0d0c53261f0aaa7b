"""Maintenance as its tasks do it: retention of runs that nobody works on, one damaged run hides no other."""

from pathlib import Path

import pytest

from engine.repair import run_folders
from engine.store import Store, step_path
from tasks import maintenance
from tests.helpers.runs import tiny_run


def with_weights(root: Path, run_key: str, iterations: int) -> Path:
    """Folder of a run whose train steps hold weights, its lease given back."""
    run, _ = tiny_run(root, run_key, checkpoint={"keep_last": 1, "keep_best": 0})
    for iteration in range(1, iterations + 1):
        with run.store.commit(step_path("train", iteration)) as draft:
            (draft.folder / "weights").write_text("w")
            draft.facts = {"weights": True}
    run.store.lease.release()
    return run.store.folder


def pruned(folder: Path) -> list[int]:
    store = Store(folder, "digest")
    paths = {number: store.folder / step_path("train", number) / "weights" for number in (1, 2, 3)}
    return [number for number, path in paths.items() if not path.exists()]


def test_weights_that_a_killed_run_left_are_pruned_by_its_own_rules(tmp_path: Path):
    folder = with_weights(tmp_path, "ended", iterations=3)
    report = maintenance.prune_runs.fn(str(tmp_path))
    assert pruned(folder) == [1, 2] and report == {"ended": "weights of iterations 1, 2 removed"}
    assert not (folder / "OWNER").exists()
    assert maintenance.prune_runs.fn(str(tmp_path)) == {}


def test_a_run_that_somebody_works_on_is_left_alone(tmp_path: Path):
    folder = with_weights(tmp_path, "living", iterations=3)
    Store(folder, "digest").lease.acquire()
    assert maintenance.prune_runs.fn(str(tmp_path)) == {} and pruned(folder) == []


def test_a_damaged_run_is_named_and_the_others_are_put_in_order(tmp_path: Path):
    folder = with_weights(tmp_path, "whole", iterations=2)
    broken = with_weights(tmp_path, "broken", iterations=2)
    (broken / "run.json").write_text("{")
    report = maintenance.prune_runs.fn(str(tmp_path))
    assert "does not parse" in report["broken"] and pruned(folder)[:1] == [1]
    assert [path.name for path in run_folders(str(tmp_path))] == ["broken", "whole"]


@pytest.mark.parametrize("flow_runs", [[], ()])
def test_without_lost_flow_runs_no_server_is_asked(flow_runs: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    maintenance.close_flow_runs(flow_runs)
