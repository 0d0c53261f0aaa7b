"""Each placement that cannot work ends the command with a clear error, and leaves no process behind."""

import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.controller.cluster import cluster
from engine.controller.layout import PoolPlan
from engine.controller.pool import require_capacity
from engine.errors import ConfigError, TransientError
from engine.session import Session
from tests.helpers.clusters import processes_of
from tests.helpers.command import SMOKE, environment
from tests.helpers.runs import tiny_run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
HANG_S = 60.0  # for a case; each takes a few seconds
MARK = "HYBRIDFLOW_TEST_MARK"  # environment variable that every process of a command inherits
GONE_S = 15.0  # for processes that are ending to be gone

REFUSED = {
    "a role without a pool": (
        ["placement={mode: map, pools: {main: {}}, roles: {rollout: main, policy: main}}"],
        ["placement.roles.reward", "which has no pool; give it one of main"],
    ),
    "ranks that do not divide": (
        ["train.backend=torch", "train.tensor_parallel=2", "placement.ranks=3"],
        ["train.tensor_parallel = 2", "does not divide the 3 ranks of policy; use one of [1, 3]"],
    ),
    "a layout that the backend does not support": (
        ["train.backend=deepspeed", "train.tensor_parallel=2", "placement.ranks=2"],
        [
            "train.tensor_parallel = 2",
            "the deepspeed backend spreads state, not layers; use train.backend: fsdp or torch",
        ],
    ),
    "a placement that this machine can never meet": (
        [
            "placement={mode: map, pools: {main: {resources: {GPU: 512}}}, "
            "roles: {rollout: main, policy: main, reward: main}}"
        ],
        ["placement.pools.main.resources.GPU = 512.0", "the pools ask for 512 GPUs in all", "this machine has"],
    ),
}


@pytest.fixture
def marked() -> Iterator[dict[str, str]]:
    """Environment of a command whose processes can be told from all others; they are ended with the test."""
    mark = uuid.uuid4().hex
    yield environment() | {MARK: mark}
    for process in living(mark):
        process.kill()


def living(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def ends(arguments: list[str], cwd: Path, marked: dict[str, str]) -> tuple[int, str]:
    """Exit code and standard error of a run, after which no process of it is left."""
    command = [sys.executable, "-m", "engine.cli", "run", *arguments]
    with (cwd / "command.err").open("w+") as errors:
        done = subprocess.run(
            command, cwd=cwd, env=marked, stdout=subprocess.DEVNULL, stderr=errors, timeout=HANG_S, check=False
        )
        errors.seek(0)
        told = errors.read()
    deadline = time.monotonic() + GONE_S
    while (left := living(marked[MARK])) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"left behind: {left}\n{told}"
    return done.returncode, told


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_before_anything_starts(name: str, tmp_path: Path, marked: dict[str, str]) -> None:
    options, told = REFUSED[name]
    code, errors = ends([str(SMOKE), *(part for option in options for part in ("--set", option))], tmp_path, marked)
    assert code == 2, errors
    assert all(words in errors for words in told), errors
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("on_cluster")
def test_a_worker_whose_constructor_raises_is_told_with_role_and_rank(tmp_path: Path) -> None:
    """The engine's constructor finds samples longer than the model has positions; policy and scorer are well."""
    rollout = {"max_response_tokens": 500}
    run, data = tiny_run(tmp_path, "unbuildable", rollout=rollout, placement={"mode": "colocate", "ranks": 2})
    with pytest.raises(ConfigError, match="A sample of 508 tokens does not fit the model") as caught:
        session = Session(run)
        session.rollout(1, session.start(data))  # whichever waits first is told
    assert caught.value.where == {"role": "rollout", "rank": 0}
    assert not processes_of("unbuildable")


@pytest.mark.usefixtures("on_cluster")
def test_a_port_in_use_is_nobodys_concern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks meet although the port that the usual variable names is taken."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        run, data = tiny_run(tmp_path, "port", placement={"mode": "colocate", "ranks": 2})
        session = Session(run)
        try:
            assert session.start(data).path == "start"
        finally:
            session.close()
    assert not processes_of("port")


@pytest.mark.usefixtures("on_cluster")
def test_a_placement_that_a_cluster_can_never_meet_is_told_at_once(tmp_path: Path) -> None:
    placement: dict[str, Any] = {"mode": "colocate", "ranks": 64, "timeout_s": 600.0}
    run, data = tiny_run(tmp_path, "never", placement=placement)
    with pytest.raises(ConfigError, match=r"asked for 64 x .* the cluster has \{'CPU': 16.0\} in all"):
        Session(run).start(data)
    assert not processes_of("never")


@pytest.mark.usefixtures("on_cluster")
def test_a_placement_that_was_met_before_may_be_met_again_once_a_node_is_back() -> None:
    with cluster("back"), pytest.raises(TransientError, match="asked for 64 x"):
        require_capacity({"shared": PoolPlan(64)}, met_before=True)


@pytest.mark.usefixtures("on_cluster")
def test_the_command_does_not_retry_a_placement_that_its_cluster_can_never_meet(
    tmp_path: Path, marked: dict[str, str]
) -> None:
    on_cluster = marked | {name: os.environ[name] for name in os.environ if name.startswith("RAY_")}
    roles = "roles: {rollout: main, policy: main, reward: main}"
    placement = f"placement={{mode: map, pools: {{main: {{resources: {{scratch: 64}}}}}}, {roles}}}"
    code, errors = ends([str(SMOKE), "--set", placement], tmp_path, on_cluster)
    assert code == 2, errors
    assert "asked for 1 x {'scratch': 64.0}" in errors and "tried again" not in errors, errors
