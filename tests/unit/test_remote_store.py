"""Run directories on object storage: another machine goes on where the first one stopped, and nothing is made twice."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.errors import StoreError, TransientError
from engine.remote import Place
from engine.remote_store import RemoteStore, store_in
from engine.runs import run_folder
from engine.store import MANIFEST, PRUNED, StepRef
from tests.helpers.storage import Storage

DIGEST = "d" * 64
TRAIN = "iterations/00001/train"


@pytest.fixture
def root(storage: Storage) -> str:
    return storage.new_root()


@pytest.fixture
def place(root: str) -> Place:
    return Place(f"{root}/run")


@pytest.fixture
def machine(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RemoteStore]]:
    """Opens the run on a machine of this name, which has a cache of its own; owner: takes the lease as well."""
    opened: list[RemoteStore] = []

    def open_on(name: str, *, owner: bool = True) -> RemoteStore:
        monkeypatch.setenv("HYBRIDFLOW_CACHE", str(tmp_path / name))
        folder = run_folder(root, "run")
        folder.mkdir(parents=True, exist_ok=True)
        store = store_in(folder, DIGEST)
        assert isinstance(store, RemoteStore)
        opened.append(store)
        if owner:
            store.lease.acquire()
        return store

    yield open_on
    for store in opened:
        store.lease.release()


def commit(store: RemoteStore, path: str, content: str = "weights", parent: StepRef | None = None) -> StepRef:
    with store.commit(path, parent=parent) as draft:
        (draft.folder / "deep").mkdir()
        (draft.folder / "deep" / "file").write_text(content)
        (draft.folder / "other").write_text("x")
        draft.facts = {"weights": True}
    return draft.ref


def file_of(place: Place, path: str) -> str:
    """Name of the file `deep/file` of a step at the storage."""
    (found,) = (name for name in place.sizes(path) if name.endswith("/deep/file"))
    return found


class TestAnotherMachine:
    def test_goes_on_and_fetches_only_what_is_read(self, machine: Callable[..., RemoteStore], storage: Storage):
        first = machine("first")
        data = commit(first, "data")
        train = commit(first, TRAIN, parent=data)
        first.lease.release()
        storage.requests.clear()

        second = machine("second")
        assert second.committed("data") == data and second.committed(TRAIN, parent=data) == train
        assert second.latest("train") == (1, train) and second.manifest(train).facts == {"weights": True}
        assert not (second.folder / TRAIN / "deep" / "file").exists()
        assert (second.read(train) / "deep" / "file").read_text() == "weights"
        assert not (second.folder / "data" / "deep" / "file").exists()
        assert not storage.written("/files-") and not storage.written(MANIFEST)
        child = commit(second, "iterations/00002/train", parent=train)
        second.lease.release()
        assert machine("first").committed(child.path, parent=train) == child

    def test_what_the_storage_holds_counts(self, machine: Callable[..., RemoteStore], caplog: pytest.LogCaptureFixture):
        first = machine("first")
        ref = commit(first, "data", "here")
        first.lease.release()
        second = machine("second")
        assert second.committed("data") == ref
        second._quarantine(second.folder / "data", "to be made again")
        other = commit(second, "data", "there")
        second.lease.release()
        with caplog.at_level(logging.WARNING):
            again = machine("first")
            assert again.committed("data") == other != ref
        assert (again.read(other) / "deep" / "file").read_text() == "there"
        (aside,) = (again.folder / "quarantine").iterdir()
        assert (aside / "deep" / "file").read_text() == "here" and "another one" in (aside / "REASON").read_text()

    def test_a_reader_writes_nothing_to_the_storage(self, machine: Callable[..., RemoteStore], storage: Storage):
        first = machine("first")
        ref = commit(first, "data")
        first.lease.release()
        storage.requests.clear()
        reader = machine("second", owner=False)
        assert reader.committed("data") == ref and (reader.read(ref) / "other").read_text() == "x"
        assert {method for method, _ in storage.requests} <= {"GET", "HEAD"}

    def test_only_the_owner_may_commit(self, machine: Callable[..., RemoteStore], place: Place):
        first, second = machine("first"), machine("second", owner=False)
        with pytest.raises(StoreError, match="does not own"):
            commit(second, "data")
        assert commit(first, "data") and second.committed("data") is None  # looked at before

    def test_a_pruned_step_is_pruned_everywhere(self, machine: Callable[..., RemoteStore], place: Place):
        first = machine("first")
        ref = commit(first, TRAIN)
        first.lease.release()
        second = machine("second")
        second.read(ref)
        second.prune(ref)
        assert set(place.sizes(TRAIN)) == {f"{TRAIN}/{MANIFEST}", f"{TRAIN}/{PRUNED}"}
        second.lease.release()
        again = machine("first")
        assert again.committed(TRAIN) == ref and again.is_pruned(ref)
        assert not (again.folder / TRAIN / "deep" / "file").exists()
        with pytest.raises(StoreError, match="removed by retention"):
            again.read(ref)

    def test_pruning_that_was_broken_off_is_finished(self, machine: Callable[..., RemoteStore], place: Place):
        first = machine("first")
        ref = commit(first, TRAIN)
        place.write(f"{TRAIN}/{PRUNED}", b"")  # killed before the files were removed
        first.lease.release()
        second = machine("second")
        assert second.committed(TRAIN) == ref and second.is_pruned(ref)
        assert not [name for name in place.sizes(TRAIN) if "/files-" in name]


class TestUpload:
    def test_that_fails_is_told_and_done_by_the_next_attempt(
        self, machine: Callable[..., RemoteStore], storage: Storage, place: Place
    ):
        first = machine("first")
        storage.fails = lambda request: request[0] == "PUT" and request[1].endswith("/other")
        with pytest.raises(TransientError, match="could not be uploaded") as caught:
            commit(first, TRAIN)
        assert caught.value.retryable and f"{TRAIN}/files-" in str(caught.value) and "made twice" in str(caught.value)
        assert f"{TRAIN}/{MANIFEST}" not in place.sizes()
        assert machine("second", owner=False).committed(TRAIN) is None

        storage.fails = lambda request: False
        ref = first.committed(TRAIN)
        assert ref is not None and f"{TRAIN}/{MANIFEST}" in place.sizes()
        assert len(storage.written("/deep/file")) == 1, "what had arrived is not sent again"
        assert len(storage.written(MANIFEST)) == 1

    def test_of_its_manifest_that_fails_leaves_no_step(
        self, machine: Callable[..., RemoteStore], storage: Storage, place: Place
    ):
        first = machine("first")
        storage.fails = lambda request: request[0] == "PUT" and request[1].endswith(MANIFEST)
        with pytest.raises(TransientError, match="could not be created"):
            commit(first, TRAIN)
        first.lease.release()
        storage.fails = lambda request: False
        again = machine("first")  # a new attempt uploads before anything else is done
        assert again.latest("train") is not None
        assert [path.rsplit("/", 1)[1] for path in storage.written(TRAIN)][-2:] == [MANIFEST, MANIFEST]

    def test_to_a_server_that_is_away(self, machine: Callable[..., RemoteStore], storage: Storage):
        first = machine("first")
        first.committed(TRAIN)
        storage.stop()
        try:
            with pytest.raises(TransientError), first.commit(TRAIN) as draft:
                (draft.folder / "file").write_text("x")
        finally:
            storage.start()
        made = first.committed(TRAIN)
        if made is None:  # refused before the step was sealed
            commit(first, TRAIN)
        assert first.committed(TRAIN) is not None and first.drafts() == []

    def test_whose_answer_was_lost_counts(self, machine: Callable[..., RemoteStore], monkeypatch: pytest.MonkeyPatch):
        first = machine("first")
        first.committed("data")
        create = Place.create

        def forgetful(place: Place, name: str, content: bytes) -> bool:
            create(place, name, content)
            return create(place, name, content)  # as a client that tries again

        monkeypatch.setattr(Place, "create", forgetful)
        assert first.committed("data") is None and commit(first, "data")

    def test_a_step_that_another_process_committed_meanwhile_is_kept(
        self, machine: Callable[..., RemoteStore], place: Place
    ):
        """As an owner that stood still for a minute meets what its successor made."""
        first = machine("first")
        text = b""
        with pytest.raises(StoreError, match="committed by another process"), first.commit("data") as draft:
            (draft.folder / "deep").mkdir()
            (draft.folder / "deep" / "file").write_text("late")
            text = _made_elsewhere(machine, first, place)
        assert place.read(f"data/{MANIFEST}") == text
        ref = first.committed("data")
        assert ref is not None and (first.read(ref) / "deep" / "file").read_text() == "early"

    def test_no_other_store_of_this_process_takes_it_for_a_leftover(
        self, machine: Callable[..., RemoteStore], place: Place, monkeypatch: pytest.MonkeyPatch
    ):
        first = machine("first")
        first.committed("data")
        create = Place.create

        def looked_at(there: Place, name: str, content: bytes) -> bool:
            monkeypatch.setattr(Place, "create", create)
            other = store_in(first.folder, DIGEST)
            other._steps_here = list  # as before the step was sealed
            assert other.committed("start") is None
            return create(there, name, content)

        monkeypatch.setattr(Place, "create", looked_at)
        ref = commit(first, "data")
        assert place.read(file_of(place, "data")) == b"weights" and first.committed("data") == ref

    def test_an_owner_that_was_replaced_changes_nothing(self, machine: Callable[..., RemoteStore], place: Place):
        first = machine("first")
        with pytest.raises(StoreError, match="taken this run over"), first.commit("data") as draft:
            (draft.folder / "file").write_text("late")
            taken = place.read("owner/00001")
            assert taken is not None
            place.create("owner/00002", taken)
        assert not place.sizes("data")
        with pytest.raises(StoreError, match="taken this run over"):
            commit(first, TRAIN)


def _made_elsewhere(machine: Callable[..., RemoteStore], first: RemoteStore, place: Place) -> bytes:
    """Commit `data` on another machine and give the run back to the first one, which does not notice."""
    tenure = first.lease.tenure
    place.write(f"owner/{tenure:05d}.released", b"")
    second = machine("second")
    commit(second, "data", "early")
    text = place.read(f"data/{MANIFEST}")
    assert text is not None
    second.lease.release()
    place.remove([name for name in place.sizes("owner") if int(name[6:11]) > tenure])
    return text


class TestDamageAtTheStorage:
    def committed_by_another(self, machine: Callable[..., RemoteStore]) -> StepRef:
        first = machine("first")
        ref = commit(first, TRAIN)
        first.lease.release()
        return ref

    def set_aside(self, place: Place, reason: str) -> None:
        names = [name for name in place.sizes() if name.startswith("quarantine/")]
        (why,) = (place.read(name) for name in names if name.endswith("/REASON"))
        assert reason in (why or b"").decode() and any(name.endswith("/deep/file") for name in names)

    def test_a_cut_file_is_moved_away_and_the_step_made_again(self, machine: Callable[..., RemoteStore], place: Place):
        self.committed_by_another(machine)
        place.write(file_of(place, TRAIN), b"wei")
        second = machine("second")
        assert second.committed(TRAIN) is None
        self.set_aside(place, "3 bytes instead of 7")
        ref = commit(second, TRAIN)
        second.lease.release()
        third = machine("third")
        assert third.committed(TRAIN) == ref and (third.read(ref) / "deep" / "file").read_text() == "weights"

    def test_changed_content_of_equal_size_is_noticed_when_read(
        self, machine: Callable[..., RemoteStore], place: Place
    ):
        ref = self.committed_by_another(machine)
        place.write(file_of(place, TRAIN), b"weightz")
        second = machine("second")
        assert second.committed(TRAIN) == ref
        with pytest.raises(StoreError, match="set aside and made again"):
            second.read(ref)
        self.set_aside(place, "does not have the content")
        assert second.committed(TRAIN) is None and commit(second, TRAIN)

    def test_a_whole_copy_here_is_uploaded_in_its_place(self, machine: Callable[..., RemoteStore], place: Place):
        ref = self.committed_by_another(machine)
        place.write(file_of(place, TRAIN), b"wei")
        assert machine("first").committed(TRAIN) == ref
        self.set_aside(place, "3 bytes instead of 7")
        assert place.read(file_of(place, TRAIN)) == b"weights"

    @pytest.mark.parametrize("text", [b"", b"{", b"{}"])
    def test_a_broken_manifest(self, machine: Callable[..., RemoteStore], place: Place, text: bytes):
        self.committed_by_another(machine)
        place.write(f"{TRAIN}/{MANIFEST}", text)
        second = machine("second")
        assert second.committed(TRAIN) is None
        self.set_aside(place, "does not parse")
        assert commit(second, TRAIN)

    def test_a_lost_manifest_is_put_back_from_the_cache(
        self, machine: Callable[..., RemoteStore], place: Place, storage: Storage
    ):
        ref = self.committed_by_another(machine)
        place.remove([f"{TRAIN}/{MANIFEST}"])
        storage.requests.clear()
        assert machine("first").committed(TRAIN) == ref and f"{TRAIN}/{MANIFEST}" in place.sizes()
        assert not storage.written("/files-")

    def test_a_lost_manifest_that_is_nowhere_else_ends_the_step(
        self, machine: Callable[..., RemoteStore], place: Place
    ):
        self.committed_by_another(machine)
        place.remove([f"{TRAIN}/{MANIFEST}"])
        second = machine("second")
        assert second.committed(TRAIN) is None and not place.sizes(TRAIN)
        assert commit(second, TRAIN)

    def test_a_lost_step_whose_files_are_not_here_is_set_aside(self, machine: Callable[..., RemoteStore], place: Place):
        self.committed_by_another(machine)
        second = machine("second")
        second.committed(TRAIN)
        second.lease.release()
        place.remove(list(place.sizes(TRAIN)))
        second = machine("second")
        assert second.committed(TRAIN) is None and commit(second, TRAIN)

    def test_a_step_of_another_parent_is_moved_away(self, machine: Callable[..., RemoteStore], place: Place):
        first = machine("first")
        data, start = commit(first, "data"), commit(first, "start")
        commit(first, TRAIN, parent=data)
        assert first.committed(TRAIN, parent=start) is None
        self.set_aside(place, "another parent")
        assert not place.sizes(TRAIN) and commit(first, TRAIN, parent=start)


class TestDamageHere:
    @pytest.mark.parametrize("content", ["wei", "weightz"])
    def test_a_damaged_copy_is_fetched_again(self, machine: Callable[..., RemoteStore], place: Place, content: str):
        first = machine("first")
        ref = commit(first, TRAIN)
        first.lease.release()
        (first.folder / TRAIN / "deep" / "file").write_text(content)
        again = machine("first")
        assert again.committed(TRAIN) == ref and (again.read(ref) / "deep" / "file").read_text() == "weights"
        assert not [name for name in place.sizes() if name.startswith("quarantine/")]

    def test_a_damaged_manifest_is_fetched_again(self, machine: Callable[..., RemoteStore]):
        first = machine("first")
        ref = commit(first, TRAIN)
        (first.folder / TRAIN / MANIFEST).write_text("{")
        assert first.committed(TRAIN) == ref and first.manifest(ref).facts == {"weights": True}
