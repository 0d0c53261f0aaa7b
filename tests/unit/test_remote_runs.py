"""Runs of a URL by key: made on one machine, known, shown, repaired and continued on another."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.commands import records
from engine.config import RunConfig
from engine.errors import ConfigError, StoreError, TransientError
from engine.remote import Place
from engine.repair import repair_runs
from engine.runs import begin_attempt, create_run, end_attempt, open_run, read_record, write_record
from tests.helpers.configs import config
from tests.helpers.storage import Storage

PRINTS = {"data/train": "1" * 64}
SOURCE = Path("/models/x")


@pytest.fixture(params=["s3", "file"])
def root(request: pytest.FixtureRequest, storage: Storage, tmp_path: Path) -> str:
    return storage.new_root() if request.param == "s3" else f"file://{tmp_path}/there"


@pytest.fixture
def on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """From now on this is a machine of this name."""
    return lambda name: monkeypatch.setenv("HYBRIDFLOW_CACHE", str(tmp_path / name))


@pytest.fixture
def options(root: str) -> Callable[..., RunConfig]:
    return lambda **changed: config(root=root, **changed)


def test_a_run_is_opened_elsewhere_as_it_was_made(options: Any, root: str, on: Any):
    on("first")
    made = create_run(options(), "one", SOURCE, PRINTS)
    begin_attempt(made)
    made.store.lease.release()
    on("second")
    opened = open_run(root, "one")
    assert (opened.config, opened.source, opened.key, opened.root) == (made.config, SOURCE, "one", root)
    assert opened.store.folder != made.store.folder
    assert read_record(opened.store.folder)["attempts"][0]["status"] == "running"
    assert json.loads(Place(f"{root}/one").read("run.json") or b"")["config"]["root"] == root


def test_attempts_of_all_machines_are_kept(options: Any, root: str, on: Any):
    for name in ("first", "second", "first"):
        on(name)
        run = create_run(options(), "one", SOURCE, PRINTS)
        begin_attempt(run)
        end_attempt(run, "failed", name)
        run.store.lease.release()
    attempts = json.loads(Place(f"{root}/one").read("run.json") or b"")["attempts"]
    assert [attempt["error"] for attempt in attempts] == ["first", "second", "first"]


def test_a_run_of_a_living_process_is_refused(options: Any, on: Any):
    on("first")
    run = create_run(options(), "one", SOURCE, PRINTS)
    on("second")
    with pytest.raises(StoreError, match="belongs to process"):
        create_run(options(), "one", SOURCE, PRINTS)
    run.store.lease.release()


def test_only_the_owner_writes_the_record(options: Any, root: str, on: Any):
    on("first")
    run = create_run(options(), "one", SOURCE, PRINTS)
    run.store.lease.release()
    before = Place(f"{root}/one").read("run.json")
    with pytest.raises(StoreError, match="does not own"):
        write_record(run.store.folder, read_record(run.store.folder) | {"attempts": [{"status": "running"}]})
    assert Place(f"{root}/one").read("run.json") == before


def test_other_options_are_refused_elsewhere(options: Any, on: Any):
    on("first")
    create_run(options(), "one", SOURCE, PRINTS).store.lease.release()
    on("second")
    with pytest.raises(ConfigError, match=r"train\.lr"):
        create_run(options(train={"lr": 0.5}), "one", SOURCE, PRINTS)
    create_run(options(), "one", SOURCE, PRINTS).store.lease.release()


def test_an_unknown_key_lists_the_known_ones(options: Any, root: str, on: Any):
    with pytest.raises(ConfigError, match="known: none"):
        open_run(root, "two")
    on("first")
    create_run(options(), "one", SOURCE, PRINTS).store.lease.release()
    on("second")
    with pytest.raises(ConfigError, match=f"no such run in {root}; known: one"):
        open_run(root, "two")


def test_a_run_that_is_gone_from_the_storage_is_not_opened_from_the_cache(options: Any, root: str, on: Any):
    on("first")
    create_run(options(), "one", SOURCE, PRINTS).store.lease.release()
    place = Place(f"{root}/one")
    place.remove(list(place.sizes()))
    with pytest.raises(ConfigError, match="no such run"):
        open_run(root, "one")


def test_it_is_shown_and_repaired_elsewhere(options: Any, root: str, on: Any):
    on("first")
    run = create_run(options(), "one", SOURCE, PRINTS)
    begin_attempt(run)
    with run.store.commit("data") as draft:
        (draft.folder / "file").write_text("x")
    on("second")
    (row,) = records.status(root, None).content["runs"]
    assert (row["run_key"], row["status"], row["next_step"]) == ("one", "running", "start") and row["owner"]["alive"]
    assert "in use by process" in str(repair_runs(root)[0].obstacle)
    run.store.lease.release()
    (done,) = repair_runs(root)
    assert done.text == "1 attempts closed, 0 drafts removed"
    shown = records.status(root, "one").content
    assert shown["status"] == "lost" and shown["attempts"][0]["status"] == "lost" and shown["owner"] is None


def test_storage_that_fails_hides_no_other_run(storage: Storage, on: Any):
    root = storage.new_root()
    on("first")
    for key in ("one", "two"):
        run = create_run(config(root=root), key, SOURCE, PRINTS)
        with run.store.commit("data") as draft:
            (draft.folder / "file").write_text("x")
        run.store.lease.release()
    storage.fails = lambda request: request[0] == "GET" and request[1].endswith("one/data/MANIFEST.json")
    one, two = records.status(root, None).content["runs"]
    assert one["status"] == "unreadable" and "Check the storage" in one["error"] and two["status"] == "created"
    storage.fails = lambda request: True
    with pytest.raises(TransientError, match="Check the storage"):
        records.status(root, None)
