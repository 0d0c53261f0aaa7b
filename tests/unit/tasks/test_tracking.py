"""A run's record in MLflow is written from the manifests: complete, without doubles, continued after a kill."""

import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Run as TrackedRun
from mlflow.exceptions import MlflowException

from engine.config import RunConfig
from engine.errors import TransientError
from tasks import mlflow_store, tracking
from tasks.mlflow_store import connect, patiently
from tasks.refs import RunRef, opened
from tasks.tracking import Tracker, end_tracking, track, tracker_for
from tests.unit.tasks.finished import Finished

pytestmark = pytest.mark.usefixtures("fake_session", "mlflow_tables")

Configure = Callable[..., RunConfig]
WRITERS, POINTS, LOCKED_S = 8, 200, 3.0
WRITER_PROGRAM = """
import multiprocessing, sys
import mlflow.store.tracking.sqlalchemy_store
from mlflow.entities import Metric
from tasks.mlflow_store import connect, patiently

def write(root, run_id, writer, points):
    client = connect(root, None)
    history = [Metric(f"writer_{writer}", float(step), 1000 + step, step) for step in range(points)]
    for first in range(0, points, 5):
        patiently(lambda: client.log_batch(run_id, metrics=history[first : first + 5]))

root, run_id, writers, points = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
context = multiprocessing.get_context("fork")
processes = [context.Process(target=write, args=(root, run_id, writer, points)) for writer in range(writers)]
for process in processes:
    process.start()
print("started", flush=True)
for process in processes:
    process.join()
sys.exit(any(process.exitcode for process in processes))
"""


def tracked(ref: RunRef) -> list[TrackedRun]:
    client = connect(ref.root, None)
    return client.search_runs([client.get_experiment_by_name("sums").experiment_id])


def history(ref: RunRef, run_id: str, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in connect(ref.root, None).get_metric_history(run_id, name)]


def test_a_run_is_described_by_options_data_tags_and_metrics(registered: Configure):
    run = Finished(registered(), "described")
    tracker_for(run.ref)
    track(run.ref)
    (seen,) = tracked(run.ref)
    assert seen.data.tags["run_key"] == "described" and seen.data.tags["seed"] == "5"
    assert seen.data.tags["config_digest"] == opened(run.ref).store.config_digest
    assert seen.data.params["rollout.samples_per_prompt"] == "2" and seen.data.params["reward.0.kind"] == "exact_match"
    contexts = {item.tags[0].value: item.dataset for item in seen.inputs.dataset_inputs}
    assert contexts.keys() == {"training", "evaluation"} and contexts["training"].name == "train"
    assert history(run.ref, seen.info.run_id, "reward/score_mean") == [(1, 0.1), (2, 0.2)]
    assert history(run.ref, seen.info.run_id, "eval/held_out/score_mean") == [(0, 0.5), (2, 0.7)]
    assert "reward/score_std" not in seen.data.metrics, "what was not measured is no number"
    committed = opened(run.ref).store.manifest(run.policy).committed_at
    (_, point) = connect(run.ref.root, None).get_metric_history(seen.info.run_id, "train/grad_norm")
    assert point.timestamp == int(committed * 1000)


def test_a_killed_run_is_continued_and_nothing_is_doubled(registered: Configure):
    """A second tracker stands for the process after the kill; the first one never ended its MLflow run."""
    run = Finished(registered(), "continued")
    Tracker(opened(run.ref)).log_committed()
    again = Tracker(opened(run.ref))
    again.log_committed()
    again.finish("FINISHED", {"verdict": "promote"})
    (seen,) = tracked(run.ref)
    assert seen.info.status == "FINISHED" and seen.data.tags["verdict"] == "promote"
    assert len(history(run.ref, seen.info.run_id, "reward/score_mean")) == 2
    assert len(seen.inputs.dataset_inputs) == 2


def test_a_run_may_continue_with_another_placement(registered: Configure):
    run = Finished(registered(), "moved")
    Tracker(opened(run.ref))
    other = opened(run.ref)
    Tracker(type(other)(registered(placement={"mode": "local"}), other.store, other.source))
    (seen,) = tracked(run.ref)
    assert seen.data.params["placement.mode"] == "colocate"


def test_an_outage_does_not_stop_the_run_and_loses_no_point(registered: Configure, monkeypatch: pytest.MonkeyPatch):
    run = Finished(registered(), "outage")
    tracker = tracker_for(run.ref)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise MlflowException("the server is away")

    with monkeypatch.context() as patch:
        patch.setattr(tracker.client, "log_batch", refuse)
        track(run.ref)
        with pytest.raises(TransientError, match="the server is away"):
            end_tracking(run.ref, "FINISHED", {})
    track(run.ref)
    end_tracking(run.ref, "FINISHED", {})
    (seen,) = tracked(run.ref)
    assert len(history(run.ref, seen.info.run_id, "reward/score_mean")) == 2


def test_a_run_goes_on_while_mlflow_is_reached(registered: Configure, monkeypatch: pytest.MonkeyPatch):
    """The first contact starts MLflow, which takes seconds; the end waits for it, and nothing is missing."""
    run, reached = Finished(registered(), "reached"), threading.Event()

    def connect_late(*arguments: Any) -> Any:
        assert reached.wait(60)
        return connect(*arguments)

    monkeypatch.setattr(tracking, "connect", connect_late)
    track(run.ref)
    track(run.ref)
    reached.set()
    end_tracking(run.ref, "FINISHED", {"verdict": "promote"})
    (seen,) = tracked(run.ref)
    assert seen.info.status == "FINISHED" and seen.data.tags["verdict"] == "promote"
    assert len(history(run.ref, seen.info.run_id, "reward/score_mean")) == 2


def test_a_cancelled_run_does_not_wait_for_a_contact_that_never_comes(
    registered: Configure, monkeypatch: pytest.MonkeyPatch
):
    run, reached = Finished(registered(), "away"), threading.Event()

    def refuse_late(*arguments: Any) -> Any:
        assert reached.wait(60)
        raise TransientError("the server is away", remedy="wait")

    monkeypatch.setattr(tracking, "connect", refuse_late)
    monkeypatch.setattr(tracking, "_CANCEL_S", 0.1)
    track(run.ref)
    end_tracking(run.ref, "KILLED", {})
    assert not reached.is_set()
    reached.set()


def test_a_cancelled_run_does_not_wait_for_an_mlflow_that_went_away(
    registered: Configure, monkeypatch: pytest.MonkeyPatch
):
    run, back = Finished(registered(), "gone"), threading.Event()
    tracker = tracker_for(run.ref)
    monkeypatch.setattr(tracker, "log_committed", lambda: back.wait(60))
    monkeypatch.setattr(tracking, "_CANCEL_S", 0.1)
    with pytest.raises(TransientError, match="did not answer within"):
        end_tracking(run.ref, "KILLED", {})
    back.set()


def test_a_contact_that_failed_is_begun_again(registered: Configure, monkeypatch: pytest.MonkeyPatch):
    run = Finished(registered(), "again")

    def refuse(*arguments: Any) -> Any:
        raise TransientError("the server is away", remedy="wait")

    with monkeypatch.context() as patch:
        patch.setattr(tracking, "connect", refuse)
        track(run.ref)
        end_tracking(run.ref, "FINISHED", {})
    track(run.ref)
    end_tracking(run.ref, "FINISHED", {})
    (seen,) = tracked(run.ref)
    assert len(history(run.ref, seen.info.run_id, "reward/score_mean")) == 2


def test_a_run_without_a_registry_does_not_touch_mlflow(config: Configure, tmp_path: Path):
    run = Finished(config(name="untracked"), "untracked")
    track(run.ref)
    assert connect(run.ref.root, None).get_experiment_by_name("untracked") is None


def test_writers_wait_for_a_locked_database(tmp_path: Path):
    """Eight processes write while another one holds the write lock: every point arrives, once."""
    root = str(tmp_path / "runs")
    client = connect(root, None)
    run_id = client.create_run(client.create_experiment("writers")).info.run_id
    command = [sys.executable, "-c", WRITER_PROGRAM, root, run_id, str(WRITERS), str(POINTS)]
    writers = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert writers.stdout is not None and writers.stdout.readline() == "started\n"
    with sqlite3.connect(tmp_path / "runs" / "mlflow.db", timeout=60, isolation_level=None) as locker:
        locker.execute("BEGIN IMMEDIATE")
        time.sleep(LOCKED_S)
        locker.execute("COMMIT")
    assert writers.wait(240) == 0
    for writer in range(WRITERS):
        points = client.get_metric_history(run_id, f"writer_{writer}")
        assert sorted(point.step for point in points) == list(range(POINTS))


def test_a_database_that_stays_locked_is_an_error_in_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mlflow_store, "LOCK_TIMEOUT_S", 0.3)
    attempts = []

    def locked() -> None:
        attempts.append(time.monotonic())
        raise MlflowException("(sqlite3.OperationalError) database is locked")

    with pytest.raises(TransientError, match="database is locked"):
        patiently(locked)
    assert len(attempts) > 1


def test_another_refusal_is_not_tried_again():
    attempts = []

    def refuse() -> None:
        attempts.append(1)
        raise MlflowException("no such run")

    with pytest.raises(TransientError, match="no such run"):
        patiently(refuse)
    assert len(attempts) == 1
