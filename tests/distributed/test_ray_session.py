"""The same steps on Ray: equal to the in-process result, on one rank and on two, and safe when a process dies."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.controller.ray_group import RUN_TAG
from engine.errors import TransientError
from engine.session import Session
from engine.store import StepRef
from tests.helpers.runs import tiny_run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


@pytest.fixture
def sessions() -> Iterator[list[Session]]:
    """Sessions to be closed at the end, whatever happened."""
    opened: list[Session] = []
    yield opened
    for session in opened:
        session.close()


def one_iteration(session: Session, data: StepRef) -> StepRef:
    return session.train(1, session.rollout(1, session.start(data)))


def processes_of(run_key: str) -> list[psutil.Process]:
    """Living processes that carry this run's tag."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_TAG) == run_key and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def numbers(session: Session, step: StepRef) -> dict[str, Any]:
    metrics = session.run.store.manifest(step).metrics
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


def test_ray_gives_what_the_in_process_group_gives_and_leaves_no_process(
    tmp_path: Path, sessions: list[Session]
) -> None:
    local_run, local_data = tiny_run(tmp_path, "local")
    local = Session(local_run)
    expected = one_iteration(local, local_data)

    run, data = tiny_run(tmp_path, "one", placement={"mode": "colocate"})
    sessions.append(one := Session(run))
    step = one_iteration(one, data)
    assert run.store.manifest(step).facts["sha256"] == local_run.store.manifest(expected).facts["sha256"]
    assert numbers(one, step) == numbers(local, expected)

    assert len(processes_of("one")) == 2
    one.close()
    assert processes_of("one") == []


def test_two_ranks_agree_with_one(tmp_path: Path, sessions: list[Session]) -> None:
    local_run, local_data = tiny_run(tmp_path, "local")
    expected = numbers(local := Session(local_run), one_iteration(local, local_data))
    run, data = tiny_run(tmp_path, "two", placement={"mode": "colocate", "ranks": 2})
    sessions.append(two := Session(run))
    found = numbers(two, one_iteration(two, data))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True), name


def test_a_killed_process_is_named_and_the_next_attempt_continues_from_the_commit(
    tmp_path: Path, sessions: list[Session]
) -> None:
    run, data = tiny_run(tmp_path, "killed", placement={"mode": "colocate"})
    sessions.append(session := Session(run))
    experience = session.rollout(1, start := session.start(data))
    for process in processes_of("killed"):
        os.kill(process.pid, signal.SIGKILL)
    time.sleep(0.5)
    with pytest.raises(TransientError, match="policy") as caught:
        session.train(1, experience)
    assert caught.value.where["role"] == "policy"
    step = session.train(1, experience)
    assert session.rollout(1, start) == experience
    assert run.store.manifest(step).parent == experience.manifest_sha256


def test_a_placement_that_cannot_be_met_says_what_was_asked_and_what_is_there(
    tmp_path: Path, sessions: list[Session]
) -> None:
    run, data = tiny_run(tmp_path, "huge", placement={"mode": "colocate", "ranks": 64, "timeout_s": 2.0})
    sessions.append(session := Session(run))
    with pytest.raises(TransientError, match=r"asked for 64 x .* the cluster has \{'CPU'"):
        session.start(data)
