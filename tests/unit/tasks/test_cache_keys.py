"""Cache keys of durable tasks: readable, and found again only while the store holds the very step they name."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config import RunConfig
from engine.errors import DataError, DivergedError, TransientError
from engine.store import StepRef
from tasks.data import start_run
from tasks.refs import RunRef, is_transient, opened, step_key
from tests.helpers.models import save_model
from tests.unit.tasks.fake_session import FakeSession

Configure = Callable[..., RunConfig]
TASK_RUN = SimpleNamespace(name="rollout-1", run_count=1)


def key(ref: RunRef, kind: str, **parameters: Any) -> str:
    """The key that Prefect would ask for before it runs the task of this name."""
    return step_key(SimpleNamespace(task=SimpleNamespace(name=kind)), {"run": ref, **parameters})


def data_of(ref: RunRef) -> StepRef:
    step = opened(ref).store.committed("data")
    assert step is not None
    return step


@pytest.fixture
def ref(config: Configure) -> RunRef:
    return start_run(config(), "keys")


def test_a_key_names_run_configuration_step_parent_and_manifest(ref: RunRef):
    data = data_of(ref)
    start = FakeSession(opened(ref)).start(data)
    digest = opened(ref).store.config_digest
    assert key(ref, "start", data=data) == (
        f"keys--config-{digest[:12]}--start--from-{data.manifest_sha256[:12]}--is-{start.manifest_sha256[:12]}"
    )


def test_a_step_that_is_not_committed_never_has_the_same_key_twice(ref: RunRef):
    data = data_of(ref)
    assert key(ref, "start", data=data) != key(ref, "start", data=data)
    assert "--new-" in key(ref, "start", data=data)


def test_a_committed_step_keeps_its_key(ref: RunRef):
    policy = FakeSession(opened(ref)).start(data_of(ref))
    FakeSession(opened(ref)).rollout(1, policy)
    one = key(ref, "rollout", iteration=1, policy=policy)
    assert one == key(ref, "rollout", iteration=1, policy=policy) and "iterations-00001-rollout" in one
    assert "--new-" in key(ref, "rollout", iteration=2, policy=policy)


def test_a_step_that_was_deleted_or_made_again_has_another_key(ref: RunRef):
    data = data_of(ref)
    FakeSession(opened(ref)).start(data)
    before = key(ref, "start", data=data)
    shutil.rmtree(opened(ref).store.folder / "start")
    assert "--new-" in key(ref, "start", data=data)
    FakeSession(opened(ref)).start(data)
    assert key(ref, "start", data=data) != before and "--is-" in key(ref, "start", data=data)


def test_a_step_made_from_another_parent_does_not_count(ref: RunRef):
    FakeSession(opened(ref)).start(data_of(ref))
    assert "--new-" in key(ref, "start", data=StepRef("data", "0" * 64))


def change_row(folder: Path) -> dict[str, Any]:
    file = folder / "sums.jsonl"
    file.write_text(file.read_text().replace('"answer": "4"', '"answer": "5"', 1))
    return {}


def change_tokenizer(folder: Path) -> dict[str, Any]:
    file = folder / "model" / "tokenizer.json"
    file.write_text(file.read_text().replace('"a":', '"\\u00e4":', 1))
    return {}


def change_weights(folder: Path) -> dict[str, Any]:
    save_model(folder / "model", seed=1)
    return {}


def change_limit(folder: Path) -> dict[str, Any]:
    file = folder / "sums.jsonl"
    return {"data": {"train": [{"path": str(file)}], "eval_fraction": 0.2, "max_prompt_tokens": 17}}


def change_seed(folder: Path) -> dict[str, Any]:
    return {"seed": 6}


@pytest.mark.parametrize("change", [change_row, change_tokenizer, change_weights, change_limit, change_seed])
def test_whatever_changes_results_changes_the_digest(
    config: Configure, tmp_path: Path, model_folder: Path, change: Callable[[Path], dict[str, Any]]
):
    """Other content under the same paths, or another option; the same again is the same."""
    shutil.copytree(model_folder, tmp_path / "model")
    options = config(model={"source": str(tmp_path / "model")})
    one, two = (opened(start_run(options, key)).store.config_digest for key in ("one", "two"))
    assert one == two
    changed = options.model_validate(options.model_dump() | change(tmp_path))
    assert opened(start_run(changed, "three")).store.config_digest != one


def test_where_work_runs_does_not_change_the_digest(config: Configure):
    one = opened(start_run(config(), "one")).store.config_digest
    two = opened(start_run(config(placement={"mode": "local"}, checkpoint={"keep_last": 1}), "two")).store.config_digest
    assert one == two


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TransientError("x"), True),
        (DivergedError("x"), False),
        (DataError("x"), False),
        (ValueError("x"), False),
        (None, False),
    ],
)
def test_only_errors_that_say_so_are_transient(error: BaseException | None, expected: bool):
    assert is_transient(SimpleNamespace(retries=3), TASK_RUN, SimpleNamespace(data=error)) is expected
