"""One living process writes to a run: a second is refused before it writes anything, a dead one is replaced."""

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from engine import lease as lease_module
from engine.errors import StoreError
from engine.lease import EXPIRY_S, Lease, lease_of
from engine.remote_lease import lease_in
from engine.runs import run_folder
from tests.helpers import programs


def owner(folder: Path) -> dict[str, object]:
    return json.loads((folder / "OWNER").read_text())


def rewrite(folder: Path, **changed: object) -> None:
    (folder / "OWNER").write_text(json.dumps(owner(folder) | changed))


@dataclass(frozen=True)
class Place:
    """A run directory: its root as commands name it, and its folder on this machine."""

    root: str
    folder: Path


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Of a local root and of one on object storage; tests/unit/test_remote_lease.py has what only the latter does."""
    root = str(tmp_path) if request.param == "folder" else request.getfixturevalue("storage").new_root()
    folder = run_folder(root, "run")
    folder.mkdir(parents=True)
    yield Place(root, folder)
    lease_in(folder).release()


def test_the_holder_is_known(place: Place):
    lease = lease_in(place.folder)
    lease.acquire()
    assert lease.held and lease.owner()["pid"] == os.getpid() and lease.owner()["alive"]
    lease.release()
    assert not lease.held and lease.owner() is None


def test_all_openers_in_a_process_share_one_lease(place: Place):
    lease_in(place.folder).acquire()
    lease_in(place.folder).acquire()  # again is harmless
    assert lease_in(place.folder) is lease_in(place.folder) and owner(place.folder)["fence"] == 1


def test_one_folder_of_two_names_has_one_lease(tmp_path: Path):
    (tmp_path / "run").mkdir()
    assert lease_of(tmp_path / "run") is lease_of(tmp_path / "x" / ".." / "run")


def test_another_living_process_is_refused_and_named(place: Place):
    holder = programs.start(programs.HOLD_LEASE, place.root)
    try:
        programs.wait_for(holder, "held")
        before = sorted(place.folder.iterdir())
        with pytest.raises(StoreError, match=f"process {holder.pid} ") as caught:
            lease_in(place.folder).acquire()
        assert caught.value.exit_code == 5 and not lease_in(place.folder).held
        assert sorted(place.folder.iterdir()) == before and owner(place.folder)["pid"] == holder.pid
        with pytest.raises(StoreError, match="does not own"):
            lease_in(place.folder).check()
    finally:
        holder.communicate("", timeout=programs.HANG_S)
    lease_in(place.folder).acquire()


def test_of_two_processes_at_once_exactly_one_gets_it(place: Place):
    racers = [programs.start(programs.HOLD_LEASE, place.root) for _ in range(2)]
    lines = []
    for racer in racers:
        assert racer.stdout is not None
        lines.append(racer.stdout.readline())
    ends = [racer.communicate("", timeout=programs.HANG_S)[1] for racer in racers]
    assert sorted(lines) == ["", "held\n"]
    assert "belongs to process" in ends[lines.index("")]


def test_a_killed_process_is_replaced_with_a_higher_fence(place: Place):
    holder = programs.start(programs.HOLD_LEASE, place.root)
    programs.wait_for(holder, "held")
    holder.send_signal(signal.SIGKILL)
    holder.communicate(timeout=programs.HANG_S)
    lease = lease_in(place.folder)
    assert lease.owner()["alive"] is False
    lease.acquire()
    assert owner(place.folder)["fence"] == 2 == lease.owner()["fence"]


def test_a_zombie_does_not_hold_it(place: Place):
    holder = programs.start(programs.HOLD_LEASE, place.root)
    programs.wait_for(holder, "held")
    holder.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + programs.HANG_S
    while psutil.Process(holder.pid).status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lease_in(place.folder).owner()["alive"] is False
    lease_in(place.folder).acquire()
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


def test_an_empty_file_names_nobody_and_is_taken_over_once_a_living_owner_would_have_restored_it(tmp_path: Path):
    """As a machine leaves it that crashed while it was written."""
    file = tmp_path / "OWNER"
    file.write_text("")
    with pytest.raises(StoreError, match="is empty") as caught:
        Lease(tmp_path).acquire()
    assert "Try again in" in str(caught.value) and file.read_text() == ""
    past = time.time() - EXPIRY_S - 1
    os.utime(file, (past, past))
    assert Lease(tmp_path).owner() is None
    taken = Lease(tmp_path)
    taken.acquire()
    assert taken.held
    taken.release()


def test_a_living_owner_restores_a_file_that_was_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lease_module, "HEARTBEAT_S", 0.02)
    lease = Lease(tmp_path)
    lease.acquire()
    before = owner(tmp_path)
    (tmp_path / "OWNER").write_text("")
    deadline = time.monotonic() + programs.HANG_S
    while not lease.held and time.monotonic() < deadline:
        time.sleep(0.01)
    assert {name: owner(tmp_path)[name] for name in ("token", "fence")} == {
        name: before[name] for name in ("token", "fence")
    }
    lease.release()
    assert not (tmp_path / "OWNER").exists()


@pytest.mark.parametrize("text", ["{", "no json"])
def test_a_broken_file_is_named(tmp_path: Path, text: str):
    (tmp_path / "OWNER").write_text(text)
    with pytest.raises(StoreError, match="does not parse") as caught:
        lease_of(tmp_path).acquire()
    assert str(tmp_path / "OWNER") in str(caught.value)


def test_a_folder_that_is_none_is_named(tmp_path: Path):
    (tmp_path / "run").write_text("a file in place of the folder")
    with pytest.raises(StoreError):
        lease_of(tmp_path / "run").acquire()
