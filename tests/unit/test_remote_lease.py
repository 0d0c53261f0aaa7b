"""Of all machines one process writes to a run on object storage; who is dead is told by heartbeats or, nearby, by process."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine import lease as lease_module
from engine import remote_lease
from engine.errors import StoreError, TransientError
from engine.lease import EXPIRY_S
from engine.remote import Place
from engine.remote_lease import RemoteLease, lease_in
from engine.runs import run_folder
from tests.helpers import programs
from tests.helpers.storage import Storage


@pytest.fixture
def root(storage: Storage) -> str:
    return storage.new_root()


@pytest.fixture
def place(root: str) -> Place:
    return Place(f"{root}/run")


@pytest.fixture
def lease(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], RemoteLease]]:
    """The lease of the run as a machine of this name sees it, with a cache of its own."""
    made: list[RemoteLease] = []

    def on(name: str) -> RemoteLease:
        monkeypatch.setenv("HYBRIDFLOW_CACHE", str(tmp_path / name))
        folder = run_folder(root, "run")
        folder.mkdir(parents=True, exist_ok=True)
        found = lease_in(folder)
        assert isinstance(found, RemoteLease)
        made.append(found)
        return found

    yield on
    for one in made:
        one.release()


def elsewhere(place: Place, number: int = 1) -> None:
    """Make an owner one of a machine that is out of sight."""
    name = f"owner/{number:05d}"
    place.write(
        name, json.dumps(json.loads(place.read(name) or b"") | {"machine": "elsewhere", "host": "far"}).encode()
    )


def test_the_holder_is_known(lease: Callable[[str], RemoteLease], place: Place):
    first = lease("first")
    assert not first.held and first.owner() is None
    first.acquire()
    first.acquire()  # again is harmless
    first.check()
    owner = lease("second").owner()
    assert first.held and owner is not None and owner["alive"] and owner["fence"] == 1
    first.release()
    assert not first.held and first.owner() is None
    first.acquire()
    assert first.tenure == 2, "numbers only rise"


def test_a_living_process_with_another_cache_is_refused_and_named(
    lease: Callable[[str], RemoteLease], root: str, tmp_path: Path, place: Place
):
    holder = programs.start(programs.HOLD_LEASE, root, str(tmp_path / "other"))
    try:
        programs.wait_for(holder, "held")
        before = place.sizes("owner").keys()
        second = lease("second")
        with pytest.raises(StoreError, match=f"process {holder.pid} ") as caught:
            second.acquire()
        assert caught.value.exit_code == 5 and not second.held
        assert place.sizes("owner").keys() - before == {"owner/clock"}
        with pytest.raises(StoreError, match="does not own"):
            second.check()
    finally:
        holder.communicate("", timeout=programs.HANG_S)
    second.acquire()
    assert second.tenure == 2


def test_a_killed_process_of_this_machine_is_replaced_at_once(
    lease: Callable[[str], RemoteLease], root: str, tmp_path: Path
):
    holder = programs.start(programs.HOLD_LEASE, root, str(tmp_path / "other"))
    programs.wait_for(holder, "held")
    holder.send_signal(signal.SIGKILL)
    holder.communicate(timeout=programs.HANG_S)
    second = lease("second")
    owner = second.owner()
    assert owner is not None and owner["alive"] is False
    second.acquire()
    assert second.tenure == 2


def test_a_holder_on_another_machine_counts_by_its_heartbeat(
    lease: Callable[[str], RemoteLease], place: Place, monkeypatch: pytest.MonkeyPatch
):
    first = lease("first")
    first.acquire()
    elsewhere(place)
    second = lease("second")
    with pytest.raises(StoreError, match="on far") as caught:
        second.acquire()
    assert f"{EXPIRY_S:.0f} s after its last sign of life" in str(caught.value)
    modified = Place.modified
    late = EXPIRY_S + 1.0

    def as_later(place: Place, name: str) -> float:
        return modified(place, name) + (late if name.endswith("clock") else 0.0)

    monkeypatch.setattr(Place, "modified", as_later)
    second.acquire()
    assert second.tenure == 2
    with pytest.raises(StoreError, match="has taken this run over"):
        first.check()
    first.release()
    second.check()


def test_of_two_at_once_the_second_to_come_is_refused(
    lease: Callable[[str], RemoteLease], monkeypatch: pytest.MonkeyPatch
):
    first, second = lease("first"), lease("second")
    create = Place.create

    def overtaken(place: Place, name: str, content: bytes) -> bool:
        monkeypatch.setattr(Place, "create", create)
        second.acquire()
        return create(place, name, content)

    monkeypatch.setattr(Place, "create", overtaken)
    with pytest.raises(StoreError, match="belongs to process"):
        first.acquire()
    assert second.held and second.tenure == 1 and not first.held


def test_a_creation_whose_answer_was_lost_counts(lease: Callable[[str], RemoteLease], monkeypatch: pytest.MonkeyPatch):
    create = Place.create
    monkeypatch.setattr(Place, "create", lambda *args: create(*args) and False)
    first = lease("first")
    first.acquire()
    assert first.held and first.tenure == 1


def test_one_taken_while_the_storage_failed_is_found_again(lease: Callable[[str], RemoteLease], storage: Storage):
    first = lease("first")
    storage.fails = lambda request: request[0] == "PUT" and request[1].endswith(".beat")
    with pytest.raises(TransientError):
        first.acquire()
    assert not first.held
    storage.fails = lambda request: False
    first.acquire()
    assert first.held and first.tenure == 1


def test_the_holder_beats_though_the_storage_fails_now_and_then(
    lease: Callable[[str], RemoteLease], storage: Storage, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lease_module, "HEARTBEAT_S", 0.05)
    first = lease("first")
    first.acquire()
    storage.fails = lambda request: True
    wait_for_beats(storage, 2)
    storage.fails = lambda request: False
    wait_for_beats(storage, 2)
    first.check()


def wait_for_beats(storage: Storage, count: int) -> None:
    storage.requests.clear()
    deadline = time.monotonic() + programs.HANG_S
    while len(storage.written(".beat")) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_one_that_did_not_beat_for_long_beats_before_it_writes(lease: Callable[[str], RemoteLease], storage: Storage):
    first = lease("first")
    first.acquire()
    storage.requests.clear()
    first.check()
    assert not storage.written(".beat")
    first._beaten -= EXPIRY_S
    storage.fails = lambda request: request[0] == "PUT"
    with pytest.raises(TransientError):
        first.check()
    storage.fails = lambda request: False
    first.check()
    assert storage.written(".beat")


def test_a_broken_owner_is_named(lease: Callable[[str], RemoteLease], place: Place):
    place.create("owner/00004", b"{")
    with pytest.raises(StoreError, match="cannot be read") as caught:
        lease("first").acquire()
    assert "owner/00004" in str(caught.value) and "owner/00004.released" in str(caught.value)


def test_an_owner_that_was_removed_writes_nothing_more(lease: Callable[[str], RemoteLease], place: Place):
    first = lease("first")
    first.acquire()
    place.remove(list(place.sizes("owner")))
    with pytest.raises(StoreError, match="not at the storage any more"):
        first.check()


def test_machines_that_cannot_be_told_apart_count_by_heartbeats(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote_lease.os, "readlink", lambda path: (_ for _ in ()).throw(FileNotFoundError(path)))
    assert remote_lease._NOWHERE in remote_lease._machine()
