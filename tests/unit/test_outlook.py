"""What a run would do next is read from its folder: steps in order, each against its parent, and the pace of the last ones."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.offline_checks import commit_points, evaluated_at
from engine.outlook import outlook, seconds_left, steps_of
from engine.store import StepRef, Store
from tests.helpers.offline import offline_config

CONFIG: dict[str, Any] = {"iterations": 3, "evaluation": {"every": 2}, "registry": {"model": "m"}}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path, "digest")
    store.lease.acquire()
    return store


def commit(
    store: Store, until: str, config: dict[str, Any] = CONFIG, before: Callable[[str], None] = lambda step: None
) -> dict[str, StepRef]:
    """Commit the steps of a run up to and including this one; before: called with each."""
    done: dict[str, StepRef] = {}
    for step, parent in steps_of(config):
        before(step)
        with store.commit(step, parent=done[parent] if parent else None) as draft:
            (draft.folder / "file").write_text(step)
        done[step] = draft.ref
        if step == until:
            return done
    raise AssertionError(until)


def test_the_steps_of_a_run_are_those_that_the_flow_walks():
    assert [step for step, _ in steps_of(CONFIG)] == [
        "data",
        "start",
        "evaluation/00000",
        "iterations/00001/rollout",
        "iterations/00001/train",
        "iterations/00002/rollout",
        "iterations/00002/train",
        "evaluation/00002",
        "iterations/00003/rollout",
        "iterations/00003/train",
        "evaluation/00003",
        "gate",
        "registration",
    ]


def test_a_run_without_registry_ends_at_the_gate():
    assert list(steps_of(CONFIG | {"registry": None}))[-1] == ("gate", "evaluation/00003")


def test_the_first_uncommitted_step_comes_next(store: Store):
    assert outlook(store, CONFIG).next == "data"
    commit(store, "iterations/00002/rollout")
    ahead = outlook(store, CONFIG)
    assert len(ahead.reused) == 6 and ahead.next == "iterations/00002/train"
    assert ahead.text == (
        "6 steps are reused (data, start, evaluation/00000, iteration 1, iterations/00002/rollout); "
        "first step to run: iterations/00002/train"
    )


def test_a_finished_run_has_nothing_left(store: Store):
    commit(store, "registration")
    ahead = outlook(store, CONFIG)
    assert ahead.next is None and ahead.text.endswith("every step is committed")


def test_a_step_of_another_parent_is_not_reused_nor_what_follows_it(store: Store):
    commit(store, "iterations/00002/train")
    file = store.folder / "iterations/00001/train/MANIFEST.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"parent": "0" * 64}))
    ahead = outlook(Store(store.folder, "digest"), CONFIG)
    assert ahead.next == "iterations/00001/train" and ahead.reused[-1] == "iterations/00001/rollout"


def test_the_time_left_is_the_pace_of_the_last_iterations_without_the_pause_between_attempts(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    moments = {1: 1000.0, 2: 1010.0, 3: 5000.0, 4: 5010.0}
    clock = SimpleNamespace(time=lambda: moments[1], perf_counter=time.perf_counter)
    monkeypatch.setattr("engine.store.time", clock)

    def wait_for(step: str) -> None:
        if step.endswith("/train"):
            clock.time = lambda: moments[int(step.split("/")[1])]

    commit(store, "iterations/00004/train", CONFIG | {"iterations": 4}, wait_for)
    assert seconds_left(store, 4, 6) == 20.0
    assert seconds_left(store, 1, 6) is None and seconds_left(store, 0, 6) is None


@pytest.mark.parametrize(("every", "measured", "steps"), [(2, None, 6), (4, 3, 10), (5, 20, 7), (3, 3, 9)])
def test_the_steps_of_a_run_on_fixed_rows_are_those_that_its_flow_walks(
    tmp_path: Path, every: int, measured: int | None, steps: int
):
    sections = {"checkpoint": {"every": every}, "evaluation": {"every": measured}, "steps": steps}
    config = offline_config(tmp_path, tmp_path / "model", "dpo", **sections)
    walked = [step for step, _ in steps_of(config.model_dump(mode="json"))]
    assert [step for step in walked if step.endswith("/train")] == [
        f"iterations/{step:05d}/train" for step in commit_points(config)
    ]
    assert [step for step in walked if step.startswith("evaluation/")] == [
        f"evaluation/{step:05d}" for step in range(steps + 1) if step == 0 or evaluated_at(config, step)
    ]
