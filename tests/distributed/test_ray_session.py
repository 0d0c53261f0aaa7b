"""The same steps on Ray: equal to the in-process result, on one rank and on two, and safe when a process dies."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.errors import ConfigError, TransientError
from engine.metrics import OF_THE_MACHINE
from engine.session import Session
from engine.store import StepRef
from tests.helpers.clusters import processes_of
from tests.helpers.runs import tiny_run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


def one_iteration(session: Session, data: StepRef) -> StepRef:
    return session.train(1, session.rollout(1, session.start(data)))


def numbers(session: Session, step: StepRef) -> dict[str, Any]:
    metrics = session.run.store.manifest(step).metrics
    return {name: value for name, value in metrics.items() if not name.startswith(OF_THE_MACHINE)}


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
    with pytest.raises(TransientError, match=r"(was ended by SIGKILL|ended) during") as caught:
        session.train(1, experience)
    assert caught.value.where["role"] in ("policy", "policy+reward", "rollout")  # both are gone
    assert caught.value.where["rank"] == 0
    assert caught.value.where["memory at death"].endswith(" GiB")
    step = session.train(1, experience)
    assert session.rollout(1, start) == experience
    assert run.store.manifest(step).parent == experience.manifest_sha256


def test_a_stopped_process_is_noticed_named_and_replaced(tmp_path: Path, sessions: list[Session]) -> None:
    run, data = tiny_run(tmp_path, "stopped", placement={"mode": "colocate"})
    sessions.append(session := Session(run))
    experience = session.rollout(1, session.start(data))
    for process in processes_of("stopped"):
        os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(TransientError, match="was stopped"):
        session.train(1, experience)
    assert processes_of("stopped") == []
    assert session.train(1, experience).path == "iterations/00001/train"


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_part_of_ray_that_dies_is_named_and_the_cluster_built_again(
    tmp_path: Path, sessions: list[Session], name: str
) -> None:
    run, data = tiny_run(tmp_path, f"no-{name}", placement={"mode": "colocate"})
    sessions.append(session := Session(run))
    experience = session.rollout(1, session.start(data))
    parts = [child for child in psutil.Process().children() if child.name() == name]
    max(parts, key=psutil.Process.create_time).kill()  # of this run; others belong to the cluster of all tests
    with pytest.raises(TransientError, match=rf"{name}\) was ended by SIGKILL"):
        session.train(1, experience)
    assert session.train(1, experience).path == "iterations/00001/train"


def test_a_placement_that_cannot_be_met_says_what_was_asked_and_what_is_there(
    tmp_path: Path, sessions: list[Session]
) -> None:
    run, data = tiny_run(tmp_path, "huge", placement={"mode": "colocate", "ranks": 64, "timeout_s": 2.0})
    sessions.append(session := Session(run))
    with pytest.raises(ConfigError, match=r"asked for 64 x .* the cluster has \{'CPU'"):
        session.start(data)
