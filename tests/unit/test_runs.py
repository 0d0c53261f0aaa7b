"""Runs by key: made once, continued only as what they are, described by run.json."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.config import RunConfig
from engine.errors import ConfigError, StoreError
from engine.lease import Lease
from engine.runs import (
    RECORD,
    begin_attempt,
    create_run,
    end_attempt,
    new_run_key,
    open_run,
    read_record,
    run_folder,
    write_record,
)
from tests.helpers.configs import config

PRINTS = {"data/train": "1" * 64}


@pytest.fixture
def options(tmp_path: Path) -> Any:
    def build(**changed: Any) -> RunConfig:
        return config(root=str(tmp_path), **changed)

    return build


def test_two_keys_made_at_once_differ():
    keys = {new_run_key("sums") for _ in range(100)}
    assert len(keys) == 100
    assert all(re.fullmatch(r"sums-\d{8}-\d{6}-[0-9a-f]{6}", key) for key in keys)


@pytest.mark.parametrize("key", ["", "../x", "a/b", ".x", "a b", "x" * 121, "a\n"])
def test_a_key_that_is_no_folder_name_is_refused(key: str, tmp_path: Path):
    with pytest.raises(ConfigError, match="run_key"):
        run_folder(str(tmp_path), key)


def test_the_record_says_what_the_run_is(options: Any, tmp_path: Path):
    run = create_run(options(), "one", Path("/models/x"), PRINTS)
    record = read_record(run.store.folder)
    assert record["run_key"] == run.key == "one" and record["seed"] == 3
    assert record["config_digest"] == run.store.config_digest
    assert (record["fingerprints"], record["source"], record["attempts"]) == (PRINTS, "/models/x", [])
    assert "torch" in record["packages"] and record["config"]["iterations"] == 3


def test_a_run_is_opened_as_it_was_made(options: Any, tmp_path: Path):
    made = create_run(options(), "one", Path("/models/x"), PRINTS)
    opened = open_run(str(tmp_path), "one")
    assert (opened.config, opened.source, opened.key) == (made.config, made.source, "one")
    assert opened.store.config_digest == made.store.config_digest


def test_an_edited_configuration_is_not_continued(options: Any, tmp_path: Path):
    run = create_run(options(), "one", Path("/models/x"), PRINTS)
    record = read_record(run.store.folder)
    record["config"]["train"]["lr"] = 0.5
    write_record(run.store.folder, record)
    with pytest.raises(StoreError, match=r"run\.json was edited"):
        open_run(str(tmp_path), "one")


@pytest.mark.parametrize("content", ["{}", "[]", "null", '{"config": {}}'])
def test_a_record_without_its_parts_is_named(options: Any, tmp_path: Path, content: str):
    run = create_run(options(), "one", Path("/models/x"), PRINTS)
    (run.store.folder / RECORD).write_text(content)
    with pytest.raises(StoreError, match="record does not parse"):
        open_run(str(tmp_path), "one")


def test_a_moved_root_is_opened_where_it_is_now(options: Any, tmp_path: Path):
    create_run(options(), "one", Path("/models/x"), PRINTS).store.lease.release()
    shutil.copytree(tmp_path / "one", tmp_path / "moved" / "one")
    assert open_run(str(tmp_path / "moved"), "one").config.root == str(tmp_path / "moved")


def test_the_same_options_continue_a_run_and_keep_its_record(options: Any):
    run = create_run(options(), "one", Path("/models/x"), PRINTS)
    begin_attempt(run)
    again = create_run(options(placement={"mode": "split"}), "one", Path("/moved/x"), PRINTS)
    assert len(read_record(again.store.folder)["attempts"]) == 1
    assert again.config.placement.mode == "split"  # how it continues may differ


def test_other_options_are_refused_with_both_values(options: Any, tmp_path: Path):
    create_run(options(), "one", Path("/models/x"), PRINTS).store.lease.release()
    before = (tmp_path / "one" / RECORD).read_bytes()
    with pytest.raises(ConfigError) as caught:
        create_run(options(train={"lr": 0.5}, seed=9), "one", Path("/models/x"), PRINTS)
    assert {problem.key: problem.value for problem in caught.value.problems} == {"train.lr": 0.5, "seed": 9}
    assert "1e-05" in str(caught.value) and caught.value.exit_code == 2
    assert (tmp_path / "one" / RECORD).read_bytes() == before


def test_a_refused_continuation_does_not_block_the_next_one(options: Any, tmp_path: Path):
    create_run(options(), "one", Path("/models/x"), PRINTS).store.lease.release()
    with pytest.raises(ConfigError):
        create_run(options(seed=9), "one", Path("/models/x"), PRINTS)
    Lease(tmp_path / "one").acquire()


def test_other_data_under_the_same_options_is_refused(options: Any):
    create_run(options(), "one", Path("/models/x"), PRINTS)
    with pytest.raises(ConfigError, match="changed content"):
        create_run(options(), "one", Path("/models/x"), {"data/train": "2" * 64})


def test_a_run_of_another_process_is_refused_before_anything_is_written(options: Any, tmp_path: Path):
    (tmp_path / "one").mkdir()
    Lease(tmp_path / "one").acquire()  # as another opener, living
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StoreError, match="belongs to process"):
        create_run(options(), "one", Path("/models/x"), PRINTS)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_unknown_key_lists_the_known_ones(options: Any, tmp_path: Path):
    create_run(options(), "one", Path("/models/x"), PRINTS)
    with pytest.raises(ConfigError, match="known: one"):
        open_run(str(tmp_path), "two")
    with pytest.raises(ConfigError, match="known: none"):
        open_run(str(tmp_path / "nowhere"), "two")


@pytest.mark.parametrize("text", ["", "{", "\x00"])
def test_a_broken_record_is_named(options: Any, tmp_path: Path, text: str):
    create_run(options(), "one", Path("/models/x"), PRINTS)
    (tmp_path / "one" / RECORD).write_text(text)
    with pytest.raises(StoreError, match="does not parse") as caught:
        open_run(str(tmp_path), "one")
    assert str(tmp_path / "one" / RECORD) in str(caught.value)


def test_a_record_of_another_version_says_so(options: Any, tmp_path: Path):
    run = create_run(options(), "one", Path("/models/x"), PRINTS)
    record = read_record(run.store.folder)
    record["config"]["option_of_tomorrow"] = 1
    (tmp_path / "one" / RECORD).write_text(json.dumps(record))
    with pytest.raises(StoreError, match="not one of this version"):
        open_run(str(tmp_path), "one")


def test_a_root_that_is_a_file_is_named(tmp_path: Path):
    (tmp_path / "runs").write_text("a file in place of the folder")
    with pytest.raises(StoreError, match="cannot be made") as caught:
        create_run(config(root=str(tmp_path / "runs")), "one", Path("/models/x"), PRINTS)
    assert str(tmp_path / "runs") in str(caught.value)


def test_attempts_are_kept_with_their_ends(options: Any):
    run = create_run(options(), "one", Path("/models/x"), PRINTS)
    begin_attempt(run)
    end_attempt(run, "failed", "TransientError: no answer")
    begin_attempt(run)
    first, second = read_record(run.store.folder)["attempts"]
    assert (first["status"], first["error"]) == ("failed", "TransientError: no answer") and "ended" in first
    assert second["status"] == "running" and "ended" not in second


def test_a_machine_without_git_still_makes_runs(options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    run = create_run(options(), "one", Path("/models/x"), PRINTS)
    assert read_record(run.store.folder)["code_revision"] is None
