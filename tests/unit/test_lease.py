"""One living process writes to a run: a second is refused before it writes anything, a dead one is replaced."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from engine import lease as lease_module
from engine.errors import StoreError
from engine.lease import EXPIRY_S, Lease, lease_of
from tests.helpers import programs

HOLD = """
import sys, time
from pathlib import Path
from engine.lease import lease_of
lease = lease_of(Path(sys.argv[1]))
lease.acquire()
print("held", flush=True)
sys.stdin.read()
lease.release()
"""


def owner(folder: Path) -> dict[str, object]:
    return json.loads((folder / "OWNER").read_text())


def rewrite(folder: Path, **changed: object) -> None:
    (folder / "OWNER").write_text(json.dumps(owner(folder) | changed))


def test_the_holder_is_known(tmp_path: Path):
    lease = lease_of(tmp_path)
    lease.acquire()
    assert lease.held and lease.owner()["pid"] == os.getpid() and lease.owner()["alive"]
    lease.release()
    assert not lease.held and lease.owner() is None


def test_all_openers_in_a_process_share_one_lease(tmp_path: Path):
    (tmp_path / "run").mkdir()
    assert lease_of(tmp_path / "run") is lease_of(tmp_path / "x" / ".." / "run")
    lease_of(tmp_path / "run").acquire()
    lease_of(tmp_path / "run").acquire()  # again is harmless
    assert owner(tmp_path / "run")["fence"] == 1


def test_another_living_process_is_refused_and_named(tmp_path: Path):
    holder = programs.start(HOLD, str(tmp_path))
    try:
        programs.wait_for(holder, "held")
        before = sorted(tmp_path.iterdir())
        with pytest.raises(StoreError, match=f"process {holder.pid} ") as caught:
            lease_of(tmp_path).acquire()
        assert caught.value.exit_code == 5 and not lease_of(tmp_path).held
        assert sorted(tmp_path.iterdir()) == before and owner(tmp_path)["pid"] == holder.pid
        with pytest.raises(StoreError, match="does not own"):
            lease_of(tmp_path).check()
    finally:
        holder.communicate("", timeout=programs.HANG_S)
    lease_of(tmp_path).acquire()


def test_of_two_processes_at_once_exactly_one_gets_it(tmp_path: Path):
    racers = [programs.start(HOLD, str(tmp_path)) for _ in range(2)]
    lines = []
    for racer in racers:
        assert racer.stdout is not None
        lines.append(racer.stdout.readline())
    ends = [racer.communicate("", timeout=programs.HANG_S)[1] for racer in racers]
    assert sorted(lines) == ["", "held\n"]
    assert "belongs to process" in ends[lines.index("")]


def test_a_killed_process_is_replaced_with_a_higher_fence(tmp_path: Path):
    holder = programs.start(HOLD, str(tmp_path))
    programs.wait_for(holder, "held")
    holder.send_signal(signal.SIGKILL)
    holder.communicate(timeout=programs.HANG_S)
    assert lease_of(tmp_path).owner()["alive"] is False
    lease_of(tmp_path).acquire()
    assert owner(tmp_path)["fence"] == 2


def test_a_zombie_does_not_hold_it(tmp_path: Path):
    holder = programs.start(HOLD, str(tmp_path))
    programs.wait_for(holder, "held")
    holder.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + programs.HANG_S
    while psutil.Process(holder.pid).status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lease_of(tmp_path).owner()["alive"] is False
    lease_of(tmp_path).acquire()
    holder.communicate(timeout=programs.HANG_S)


def test_a_later_process_with_the_same_number_does_not_hold_it(tmp_path: Path):
    Lease(tmp_path).acquire()
    second = Lease(tmp_path)
    with pytest.raises(StoreError, match="belongs to process"):
        second.acquire()
    rewrite(tmp_path, started=float(owner(tmp_path)["started"]) - 100.0)
    second.acquire()
    assert second.held and owner(tmp_path)["fence"] == 2


def test_a_replaced_holder_stops_and_leaves_the_new_one_alone(tmp_path: Path):
    first, second = Lease(tmp_path), Lease(tmp_path)
    first.acquire()
    rewrite(tmp_path, started=0.0)
    second.acquire()
    with pytest.raises(StoreError, match="does not own"):
        first.check()
    first.release()
    assert second.held
    second.check()


def test_a_holder_on_another_host_counts_by_its_heartbeat(tmp_path: Path):
    Lease(tmp_path).acquire()
    rewrite(tmp_path, host="elsewhere", pid=1)
    with pytest.raises(StoreError, match="on elsewhere"):
        Lease(tmp_path).acquire()
    past = time.time() - EXPIRY_S - 1
    os.utime(tmp_path / "OWNER", (past, past))
    Lease(tmp_path).acquire()


def test_the_holder_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lease_module, "HEARTBEAT_S", 0.02)
    lease = Lease(tmp_path)
    lease.acquire()
    os.utime(tmp_path / "OWNER", (1.0, 1.0))
    deadline = time.monotonic() + programs.HANG_S
    while (tmp_path / "OWNER").stat().st_mtime < 2.0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (tmp_path / "OWNER").stat().st_mtime > 2.0
    lease.release()


@pytest.mark.parametrize("text", ["", "{", "no json"])
def test_a_broken_file_is_named(tmp_path: Path, text: str):
    (tmp_path / "OWNER").write_text(text)
    with pytest.raises(StoreError, match="does not parse") as caught:
        lease_of(tmp_path).acquire()
    assert str(tmp_path / "OWNER") in str(caught.value)


def test_a_folder_that_is_none_is_named(tmp_path: Path):
    (tmp_path / "run").write_text("a file in place of the folder")
    with pytest.raises(StoreError):
        lease_of(tmp_path / "run").acquire()
