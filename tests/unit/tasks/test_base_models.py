"""A run of a URL finds its base model again on a machine where it lies elsewhere, and takes no other one."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.runs import Run, create_run, open_run, policy_folder
from tasks.base_models import found_here
from tasks.models import model_fingerprint
from tests.helpers.runs import tiny_config
from tests.helpers.tiny import tiny_folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The model as the configuration names it, relative to where a command is started."""
    return tiny_folder(tmp_path / "models" / "tiny")


def made(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, root: str) -> Run[Any]:
    monkeypatch.setenv("HYBRIDFLOW_CACHE", str(tmp_path / "cache"))
    config = tiny_config(tmp_path, source, sft=None).model_copy(update={"root": root})
    recorded = tmp_path / "first" / "tiny"  # where the first machine had it
    run = create_run(config, "run", recorded, {"model": model_fingerprint(source, config)})
    with run.store.commit("start") as draft:
        draft.facts = {"folder": str(recorded)}
    run.store.lease.release()
    return open_run(root, "run")


def test_a_model_that_lies_elsewhere_is_found(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch):
    run = found_here(made(tmp_path, source, monkeypatch, f"file://{tmp_path}/there"))
    assert run.source == source and run.store.folder.is_relative_to(tmp_path / "cache")
    start = run.store.committed("start")
    assert start is not None and policy_folder(run, start) == source


def test_another_model_is_refused(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch):
    run = made(tmp_path, source, monkeypatch, f"file://{tmp_path}/there")
    config = source / "config.json"
    config.write_text(config.read_text().replace("{", '{"hidden": 1,', 1))
    with pytest.raises(ConfigError, match="other models") as caught:
        found_here(run)
    assert caught.value.problems[0].key == "model" and caught.value.exit_code == 2


def test_a_model_that_is_nowhere_is_named(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch):
    run = made(tmp_path, source, monkeypatch, f"file://{tmp_path}/there")
    shutil.rmtree(source)
    with pytest.raises(ConfigError, match=r"model\.source"):
        found_here(run)


def test_of_a_local_root_nothing_is_looked_for(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch):
    run = made(tmp_path, source, monkeypatch, str(tmp_path / "runs"))
    assert found_here(run) is run
