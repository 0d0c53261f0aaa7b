"""Flow runs whose root is a URL: any worker understands it, and the end of an attempt is noted by whoever may."""

import logging
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun

from engine.errors import ConfigError
from engine.runs import Run, begin_attempt, create_run, open_run, read_record
from tasks import failure, maintenance
from tasks.mlflow_store import address
from tasks.refs import RunRef, remember
from tasks.requests import request_of
from tests.helpers.command import SMOKE
from tests.helpers.configs import config


def asked(**parameters: Any) -> FlowRun:
    return FlowRun(flow_id=uuid4(), parameters=parameters)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run[Any]:
    """One that an attempt works on, made on another machine."""
    monkeypatch.setenv("HYBRIDFLOW_CACHE", str(tmp_path / "first"))
    made = create_run(config(root=f"file://{tmp_path}/there"), "one", Path("/models/x"), {"data/train": "1" * 64})
    begin_attempt(made)
    monkeypatch.setenv("HYBRIDFLOW_CACHE", str(tmp_path / "second"))
    return made


def test_a_url_is_passed_on_as_it_is():
    assert request_of(asked(run_key="one", root="s3://bucket/x/")).run == RunRef("s3://bucket/x", "one")
    overrides = ["registry=null"]
    assert request_of(asked(config=str(SMOKE), overrides=overrides, root="s3://bucket/x", run_key="one")).run == RunRef(
        "s3://bucket/x", "one"
    )


def test_a_url_needs_an_address_of_mlflow():
    with pytest.raises(ConfigError, match=r"registry\.tracking_uri"):
        request_of(asked(config=str(SMOKE), root="s3://bucket/x", run_key="one"))
    with pytest.raises(ConfigError, match="--tracking-uri"):
        address("s3://bucket/x", None)
    assert address("s3://bucket/x", "http://mlflow:5000") == "http://mlflow:5000"


def test_a_worker_notes_the_end_of_a_process_that_died(run: Run[Any]):
    run.store.lease.release()
    ref = remember(open_run(run.root, "one"))
    failure._finish(ref, "failed", "Process 7 was killed.")
    record = read_record(open_run(run.root, "one").store.folder)
    assert (record["attempts"][0]["status"], record["attempts"][0]["error"]) == ("failed", "Process 7 was killed.")
    assert run.store.lease.owner() is None


def test_the_attempt_of_a_living_owner_is_left_alone(run: Run[Any], caplog: pytest.LogCaptureFixture):
    ref = remember(open_run(run.root, "one"))
    with caplog.at_level(logging.WARNING):
        failure._finish(ref, "failed", "gone")
    assert "could not be noted" in caplog.text and run.store.lease.held
    run.store.lease.release()
    assert read_record(open_run(run.root, "one").store.folder)["attempts"][0]["status"] == "running"


def test_maintenance_reads_a_url(run: Run[Any]):
    assert maintenance._pruned(run.root, "one") is None
    assert "in use by process" in maintenance.repair_runs.fn(run.root)["one"]
    run.store.lease.release()
    assert maintenance.sweep_leftovers.fn(run.root) == []
