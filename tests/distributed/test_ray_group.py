"""Groups on Ray: protocols across processes, results that travel from worker to worker, overlap, failures, ports."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from engine.batch import Batch
from engine.config import RunConfig
from engine.controller.cluster import cluster
from engine.controller.layout import PoolPlan
from engine.controller.local_group import LocalGroup
from engine.controller.mesh import Mesh
from engine.controller.pool import Pool
from engine.controller.ray_group import Builds, HostSet, RayGroup
from engine.controller.worker import Worker, WorkerContext
from engine.errors import TransientError, WorkerError
from tests.helpers.workers import Plain, Unbuildable

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
CALL_S = 120.0
MIB = 2**20


def context(role: str, rank: int, ranks: int) -> WorkerContext:
    return WorkerContext(role, rank, ranks, cast(RunConfig, SimpleNamespace()), Path())


class Processes:
    """Host sets of one test module in pools of their own."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.builds = Builds()

    def hosts(self, name: str, ranks: int) -> HostSet:
        pool = self._stack.enter_context(Pool(name, PoolPlan(ranks, {"CPU": 1.0}), 1, CALL_S))
        hosts = HostSet(name, pool, ranks, "groups", CALL_S, self.builds)
        self._stack.callback(hosts.close)
        return hosts


def role(hosts: HostSet, name: str, worker: type[Worker], mesh: Mesh) -> RayGroup:
    hosts.add(worker, [context(name, rank, mesh.size) for rank in range(mesh.size)])
    return RayGroup(name, hosts, mesh)


@pytest.fixture(scope="module")
def processes(ray_address: str) -> Iterator[Processes]:
    os.environ["RAY_ADDRESS"] = ray_address
    with cluster("groups"), ExitStack() as stack:
        del os.environ["RAY_ADDRESS"]
        yield Processes(stack)


@pytest.fixture(scope="module")
def four(processes: Processes) -> HostSet:
    return processes.hosts("four", 4)


@pytest.fixture(scope="module")
def wide(four: HostSet) -> RayGroup:
    """Four data-parallel ranks."""
    return role(four, "wide", Plain, Mesh(data=4))


@pytest.fixture(scope="module")
def deep(four: HostSet) -> RayGroup:
    """Two DP groups of two stages, which generate as two replicas each; in the processes of `wide`."""
    return role(four, "deep", Plain, Mesh(pipeline=2, data=2, micro_data=2))


@pytest.fixture(scope="module")
def pair(processes: Processes) -> RayGroup:
    return role(processes.hosts("pair", 2), "pair", Plain, Mesh(data=2))


def rows(count: int) -> Batch:
    return Batch({"values": torch.arange(count, dtype=torch.float32)[:, None], "group_ids": torch.arange(count)})


def local() -> LocalGroup:
    return LocalGroup(Plain, context("local", 0, 1))


class TestProtocols:
    def test_3d_goes_to_dp_groups_and_comes_from_their_last_stages(self, deep: RayGroup):
        # 5 rows over two groups: ranks 1 and 3 answer for the even and the odd rows, padding is gone.
        found = deep.call(Plain.add_rank, rows(5)).values[:, 0].tolist()
        assert found == [row + (1 if row % 2 == 0 else 3) for row in range(5)]

    def test_3d_all_micro_dp_goes_to_replicas_and_comes_from_each(self, deep: RayGroup):
        found = deep.call(Plain.add_rank_of_replica, rows(6)).values[:, 0].tolist()
        assert found == [row + row % 4 for row in range(6)]

    def test_3d_pp_only_comes_from_every_stage_once(self, deep: RayGroup):
        assert deep.call(Plain.rank) == [0, 1]

    def test_one_to_all_and_all_to_all_reach_every_rank(self, wide: RayGroup):
        assert wide.call(Plain.rows, rows(3)) == [[0, 1, 2]] * 4
        assert wide.call(Plain.echo, [*"abcd"]) == ["0 a", "1 b", "2 c", "3 d"]

    def test_ranks_of_a_set_are_in_one_process_group(self, wide: RayGroup):
        assert wide.call(Plain.total_over_ranks, 10.0) == [46.0] * 4


class TestWorkerToWorker:
    @pytest.mark.parametrize("count", [1, 7])
    def test_a_chain_over_three_groups_gives_what_one_process_gives(
        self, count: int, wide: RayGroup, deep: RayGroup, pair: RayGroup
    ):
        def chain(first: Any, second: Any, third: Any) -> Any:
            wider = first.submit(Plain.widen, rows(count), 3)
            twice = second.submit(Plain.double, wider)
            return wider.result(), twice.result(), third.submit(Plain.sums, twice).result()

        expected = chain(*[local()] * 3)
        for found in (chain(pair, wide, deep), chain(wide, wide, pair)):
            for one, other in zip(found, expected, strict=True):
                assert one.fields.keys() == other.fields.keys()
                assert all(torch.equal(one.fields[name], other.fields[name]) for name in one.fields)

    def test_a_local_result_goes_to_ray_and_back(self, pair: RayGroup):
        there = pair.submit(Plain.double, local().submit(Plain.double, rows(3)))
        assert local().call(Plain.double, there).values[:, 0].tolist() == [0.0, 8.0, 16.0]

    def test_the_controller_never_holds_what_passes_between_groups(self, pair: RayGroup, wide: RayGroup):
        def growth(mib: int) -> float:
            """MiB that the peak memory of this process grows by while 2 groups pass on a batch of `mib` MiB."""
            before = _reset_peak()
            wider = pair.submit(Plain.widen, rows(4), mib * MIB // 4 // 4)
            found = pair.call(Plain.sums, wide.submit(Plain.double, wider))
            assert found.scores.tolist() == pytest.approx([2.0 * row * mib * MIB / 16 for row in range(4)], rel=1e-3)
            return _peak() - before

        growth(1)  # whatever is loaded once
        small, large = growth(1), growth(128)
        assert large < small + 128 / 8

    def test_the_controller_takes_only_what_it_asks_for(self, pair: RayGroup):
        before = _reset_peak()
        pair.submit(Plain.widen, rows(4), 128 * MIB // 16).result()
        assert _peak() - before > 100  # the same measure does see a batch that comes here

    def test_the_role_that_failed_is_named_by_whoever_waits(self, pair: RayGroup, wide: RayGroup):
        failing = pair.submit(Plain.divide_by_zero, rows(4))
        with pytest.raises(WorkerError, match="divide_by_zero raised ZeroDivisionError") as caught:
            wide.call(Plain.sums, wide.submit(Plain.double, failing))
        assert caught.value.where == {"role": "pair", "rank": 1}
        assert str(caught.value).count("Traceback") == 1


def test_seconds_are_those_of_the_method_not_of_its_inputs(pair: RayGroup, wide: RayGroup):
    slow = pair.submit(Plain.sleep, 1.5)
    wide.call(Plain.echo, [*"abcd"])
    pair.take_seconds(), wide.take_seconds()
    waited = wide.submit(Plain.rows, rows(2))
    waited.result(), slow.result()
    assert pair.take_seconds()["pair.sleep"] >= 1.5
    assert wide.take_seconds()["wide.rows"] < 1.0


def test_groups_in_different_pools_work_at_the_same_time(pair: RayGroup, wide: RayGroup):
    pair.call(Plain.sleep, 0.0), wide.call(Plain.sleep, 0.0)
    started = time.perf_counter()
    for pending in [pair.submit(Plain.sleep, 4.0), wide.submit(Plain.sleep, 4.0)]:
        pending.result()
    assert time.perf_counter() - started < 0.8 * (4.0 + 4.0)


def test_groups_in_the_same_processes_take_turns(wide: RayGroup, deep: RayGroup):
    started = time.perf_counter()
    for pending in [wide.submit(Plain.sleep, 1.0), deep.submit(Plain.sleep, 1.0)]:
        pending.result()
    assert time.perf_counter() - started >= 2.0


def test_a_busy_port_is_nobodys_concern(processes: Processes):
    """Rank 0 listens on a port that the system found free; the variables that fix one are not read."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        os.environ["MASTER_PORT"] = str(taken.getsockname()[1])
        try:
            group = role(processes.hosts("beside", 2), "beside", Plain, Mesh(data=2))
            assert group.call(Plain.total_over_ranks, 1.0) == [3.0, 3.0]
        finally:
            del os.environ["MASTER_PORT"]


class Ended(BaseException):
    """What a signal handler raises."""


def _end(*_: object) -> None:
    raise Ended


class TestFailures:
    def test_what_a_signal_handler_raises_ends_the_wait_for_a_worker(self, pair: RayGroup):
        """As the orchestrator does on SIGTERM; Ray's own wait keeps nothing but KeyboardInterrupt."""
        pair.call(Plain.sleep, 0.0)
        before = signal.signal(signal.SIGUSR1, _end)
        timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        try:
            timer.start()
            with pytest.raises(Ended):
                pair.call(Plain.sleep, 3.0)
        finally:
            timer.join()
            signal.signal(signal.SIGUSR1, before)

    def test_a_constructor_that_raises_is_named_at_once_with_its_traceback(self, pair: RayGroup, four: HostSet):
        started = time.perf_counter()
        role(four, "broken", Unbuildable, Mesh(data=4))
        with pytest.raises(WorkerError, match="constructor raised ZeroDivisionError: no weights") as caught:
            pair.call(Plain.sleep, 60.0)  # of another role in other processes, which would take longer
        assert time.perf_counter() - started < 15.0
        assert caught.value.where == {"role": "broken", "rank": 3}
        assert str(caught.value).count("Traceback") == 1 and "in __init__" in str(caught.value)

    def test_a_process_that_ends_is_named(self, processes: Processes):
        group = role(processes.hosts("mortal", 1), "mortal", Plain, Mesh())
        with pytest.raises(TransientError, match=r"process of mortal ended( with exit code \d+)? during die") as caught:
            group.call(Plain.die)
        assert caught.value.where.items() >= {"role": "mortal", "rank": 0}.items()


def _reset_peak() -> float:
    """Forget the peak of this process's memory so far; returns the present one in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


@pytest.fixture
def node(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A child process that looks like Ray's node."""
    (tmp_path / "raylet").symlink_to("/bin/sleep")
    with subprocess.Popen([tmp_path / "raylet", "600"]) as process:
        yield process
        process.kill()


def test_what_is_killed_of_this_cluster_is_a_loss(node: "subprocess.Popen[bytes]") -> None:
    builds = Builds()
    node.kill()
    with pytest.raises(TransientError, match="was ended by SIGKILL"):
        builds.require_all("policy", "load")
    builds.watch.close()


def test_what_was_killed_of_an_earlier_cluster_is_none(node: "subprocess.Popen[bytes]") -> None:
    node.kill()
    os.waitid(os.P_PID, node.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    builds = Builds()
    builds.require_all("policy", "load")
    builds.watch.close()
