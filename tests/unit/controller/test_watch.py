"""Processes that end or stop are noticed, with signal, exit code and memory."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import TimeoutError as NothingYet
from contextlib import contextmanager

import psutil
import pytest

from engine.controller.watch import Watch, how_ended

pytestmark = pytest.mark.unit
HANG_S = 60.0


@contextmanager
def watching(program: str = "import time; time.sleep(600)") -> Iterator[tuple[Watch, psutil.Popen]]:
    """A child that is watched as rank 2 of policy and critic, and asked for its end by nobody else."""
    watch, child = Watch(), psutil.Popen([sys.executable, "-c", program])
    try:
        watch.add(child.pid, ("policy", "critic"), 2)
        yield watch, child
    finally:
        watch.close()
        child.kill()
        child.wait()


def test_a_killed_process_is_told_with_its_signal_and_its_memory() -> None:
    with watching() as (watch, child):
        with pytest.raises(NothingYet):
            watch.lost.result(2.0)
        child.send_signal(signal.SIGKILL)
        loss = watch.lost.result(HANG_S)
    assert (loss.how, loss.rank, loss.pid) == ("was ended by SIGKILL", 2, child.pid)
    assert loss.memory is not None and loss.memory > 2**20
    assert loss.where("critic").items() >= {"role": "critic", "rank": 2}.items()
    assert loss.where("rollout")["role"] == "policy+critic"


def test_a_part_of_ray_that_was_killed_is_lost_before_anything_more_is_asked_of_it() -> None:
    for _ in range(20):
        child = psutil.Popen([sys.executable, "-c", "import time; held = bytearray(2**27); time.sleep(600)"])
        watch = Watch()
        watch.add(child.pid, ("raylet",), None)
        watch.require_noticed()
        assert not watch.lost.done()
        child.kill()
        watch.require_noticed()
        assert watch.lost.done() and watch.lost.result().rank is None
        watch.close()
        child.wait()


def test_a_part_of_ray_that_is_ending_and_does_not_end_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    child, watch = psutil.Popen([sys.executable, "-c", "import time; time.sleep(600)"]), Watch()
    watch.add(child.pid, ("raylet",), None)
    monkeypatch.setattr("engine.controller.watch.NOTICED_S", 0.1)
    monkeypatch.setattr("engine.controller.watch.is_ending", lambda pid: pid == child.pid)
    watch.require_noticed()
    assert watch.lost.result(0).how == "is ending and was still there 0.1 s later"
    watch.close()
    child.kill()
    child.wait()


def test_a_process_that_ends_by_itself_is_told_with_its_exit_code() -> None:
    with watching("import time; time.sleep(1); raise SystemExit(3)") as (watch, _):
        assert watch.lost.result(HANG_S).how == "ended with exit code 3"


def test_the_signal_is_known_even_if_the_parent_asked_first() -> None:
    """As Ray's raylet does; kernels before 6.15 have forgotten it by then."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    descriptor = os.pidfd_open(child.pid)
    child.kill()
    child.wait()
    assert how_ended(child.pid, descriptor) in ("was ended by SIGKILL", "ended")
    os.close(descriptor)


def test_a_process_that_was_stopped_is_lost_and_one_that_continues_is_not() -> None:
    with watching() as (watch, child):
        child.suspend()
        with pytest.raises(NothingYet):
            watch.lost.result(1.0)
        child.resume()
        with pytest.raises(NothingYet):
            watch.lost.result(6.0)
        child.suspend()
        assert "SIGSTOP" in watch.lost.result(HANG_S).how


def test_a_process_that_had_ended_before_is_lost_at_once() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    watch = Watch()
    watch.add(ended.pid, ("reward",), 0)
    assert watch.lost.result(HANG_S).roles == ("reward",)
    watch.close()


def test_the_end_of_a_forgotten_process_is_no_loss() -> None:
    with watching() as (watch, child):
        watch.forget([child.pid])
        child.kill()
        with pytest.raises(NothingYet):
            watch.lost.result(2.0)
