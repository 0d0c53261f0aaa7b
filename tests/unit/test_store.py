"""The store: what is committed is whole, what is not committed does not exist, whatever happens in between."""

import json
import logging
import math
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import DivergedError, StoreError
from engine.remote_store import store_in
from engine.runs import run_folder
from engine.store import MANIFEST, PRUNED, StepRef, Store, step_path
from tests.helpers import programs

DIGEST = "d" * 64


@pytest.fixture
def local_store(tmp_path: Path) -> Store:
    folder = tmp_path / "run"
    folder.mkdir()
    store = Store(folder, DIGEST)
    store.lease.acquire()
    return store


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """Of a local root and of one on object storage; tests/unit/test_remote_store.py has what only the latter does."""
    if request.param == "folder":
        yield request.getfixturevalue("local_store")
        return
    folder = run_folder(request.getfixturevalue("storage").new_root(), "run")
    folder.mkdir(parents=True)
    store = store_in(folder, DIGEST)
    store.lease.acquire()
    yield store
    store.lease.release()


def commit(store: Store, path: str, content: str = "weights", parent: StepRef | None = None) -> StepRef:
    with store.commit(path, parent=parent) as draft:
        (draft.folder / "deep").mkdir()
        (draft.folder / "deep" / "file").write_text(content)
    return draft.ref


def manifest_text(store: Store, ref: StepRef) -> dict[str, object]:
    return json.loads((store.folder / ref.path / MANIFEST).read_text())


class TestCommit:
    def test_a_step_is_read_back_as_written(self, store: Store):
        data = commit(store, "data")
        with store.commit("iterations/00001/rollout", parent=data) as draft:
            (draft.folder / "experience").write_bytes(b"abc")
            draft.metrics = {"reward/score_mean": 0.5}
            draft.facts = {"samples": 3}
        ref = draft.ref
        assert store.committed(ref.path, parent=data) == ref
        assert (store.read(ref) / "experience").read_bytes() == b"abc"
        manifest = store.manifest(ref)
        assert (manifest.parent, manifest.config_digest) == (data.manifest_sha256, DIGEST)
        assert manifest.files["experience"]["size"] == 3 and manifest.facts == {"samples": 3}
        assert manifest.metrics == {"reward/score_mean": 0.5} and manifest.committed_at > 0

    def test_another_process_finds_it(self, store: Store):
        ref = commit(store, "data")
        assert store_in(store.folder, DIGEST).committed("data") == ref

    def test_nothing_committed_is_overwritten(self, store: Store):
        commit(store, "data", "first")
        with pytest.raises(StoreError, match="never overwritten"):
            commit(store, "data", "second")
        assert (store.folder / "data" / "deep" / "file").read_text() == "first"

    def test_an_error_inside_the_block_leaves_nothing(self, store: Store):
        with pytest.raises(ZeroDivisionError), store.commit("data") as draft:
            (draft.folder / "half").write_text("x")
            _ = 1 / 0
        assert store.committed("data") is None and store.drafts() == []
        commit(store, "data")

    def test_a_metric_that_was_not_measured_is_null(self, store: Store):
        with store.commit("data") as draft:
            draft.metrics = {"a": math.nan, "b": 0.0}
        assert manifest_text(store, draft.ref)["metrics"] == {"a": None, "b": 0.0}
        assert store.manifest(draft.ref).metrics == {"a": None, "b": 0.0}

    @pytest.mark.parametrize("value", [math.inf, -math.inf])
    def test_an_infinite_metric_is_refused_by_name(self, store: Store, value: float):
        with pytest.raises(DivergedError, match="train/grad_norm"), store.commit("data") as draft:
            draft.metrics = {"train/grad_norm": value}
        assert store.committed("data") is None

    def test_a_draft_has_no_reference(self, store: Store):
        with store.commit("data") as draft, pytest.raises(StoreError, match="not committed yet"):
            _ = draft.ref

    def test_only_the_owner_may_commit(self, store: Store):
        store.lease.release()
        with pytest.raises(StoreError, match="does not own"):
            commit(store, "data")
        assert store.drafts() == []

    def test_a_lease_lost_on_the_way_stops_the_commit(self, store: Store):
        with pytest.raises(StoreError, match="does not own"), store.commit("data") as draft:
            (draft.folder / "file").write_text("x")
            store.lease.release()
        assert store.committed("data") is None


class TestDamage:
    @pytest.fixture
    def store(self, local_store: Store) -> Store:
        return local_store

    @pytest.fixture
    def ref(self, store: Store) -> StepRef:
        return commit(store, "iterations/00001/train")

    def damaged(self, store: Store, ref: StepRef, reason: str) -> None:
        """The step is set aside with the reason, and can be made again."""
        assert store.committed(ref.path) is None
        (quarantined,) = (store.folder / "quarantine").iterdir()
        assert reason in (quarantined / "REASON").read_text()
        commit(store, ref.path)

    def test_a_cut_file(self, store: Store, ref: StepRef):
        (store.folder / ref.path / "deep" / "file").write_text("wei")
        self.damaged(store, ref, "3 bytes instead of 7")

    def test_a_missing_file(self, store: Store, ref: StepRef):
        (store.folder / ref.path / "deep" / "file").unlink()
        self.damaged(store, ref, "deep/file is missing")

    def test_a_missing_manifest(self, store: Store, ref: StepRef):
        (store.folder / ref.path / MANIFEST).unlink()
        self.damaged(store, ref, "no manifest")

    @pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"path": "x"}', "\x00\xff"])
    def test_a_broken_manifest(self, store: Store, ref: StepRef, text: str):
        (store.folder / ref.path / MANIFEST).write_text(text)
        self.damaged(store, ref, "does not parse")

    def test_a_manifest_of_which_a_single_fact_was_altered(self, store: Store, ref: StepRef):
        file = store.folder / ref.path / MANIFEST
        text = file.read_text()
        assert '"committed_at": 1' in text
        file.write_text(text.replace('"committed_at": 1', '"committed_at": 2'))
        self.damaged(store, ref, "altered since it was written")

    def test_a_file_where_the_folder_should_be(self, store: Store, ref: StepRef):
        shutil.rmtree(store.folder / ref.path)
        (store.folder / ref.path).write_text("not a folder")
        store.lease.release()
        assert store.committed(ref.path) is None

    def test_another_configuration(self, store: Store, ref: StepRef):
        other = Store(store.folder, "e" * 64)
        assert other.committed(ref.path) is None

    def test_a_folder_copied_from_another_step(self, store: Store, ref: StepRef):
        shutil.copytree(store.folder / ref.path, store.folder / "iterations" / "00002" / "train")
        assert store.committed("iterations/00002/train") is None
        assert store.committed(ref.path) == ref

    def test_another_parent(self, store: Store):
        first, second = commit(store, "data", "a"), commit(store, "start", "b")
        commit(store, "iterations/00001/rollout", parent=first)
        assert store.committed("iterations/00001/rollout", parent=first) is not None
        assert store.committed("iterations/00001/rollout", parent=second) is None

    def test_changed_content_of_equal_size_is_found_when_read(self, store: Store, ref: StepRef):
        (store.folder / ref.path / "deep" / "file").write_text("weightz")
        with pytest.raises(StoreError, match="content that was committed"):
            Store(store.folder, DIGEST).read(ref)

    def test_a_replaced_step_is_not_the_one_referred_to(self, store: Store, ref: StepRef):
        shutil.rmtree(store.folder / ref.path)
        commit(store, ref.path, "other")
        with pytest.raises(StoreError, match="replaced"):
            store.manifest(ref)

    def test_a_reader_sets_nothing_aside(self, store: Store, ref: StepRef, caplog: pytest.LogCaptureFixture):
        (store.folder / ref.path / "deep" / "file").write_text("wei")
        store.lease.release()
        with caplog.at_level(logging.WARNING):
            assert store.committed(ref.path) is None
        assert "3 bytes instead of 7" in caplog.text and (store.folder / ref.path).exists()

    def test_its_owner_sets_a_step_of_other_content_aside(self, store: Store, ref: StepRef):
        (store.folder / ref.path / "deep" / "file").write_text("weightz")
        store._verified.clear()  # as in the process that resumes
        with pytest.raises(StoreError, match="set aside and made again"):
            store.read(ref)
        self.damaged(store, ref, "does not have the content")


class TestLatest:
    def test_is_the_newest_usable_one(self, store: Store):
        for number in (1, 2, 10):
            commit(store, step_path("train", number))
        assert store.latest("train")[0] == 10
        assert store.latest("rollout") is None

    def test_one_without_a_manifest_does_not_count(self, local_store: Store):
        for number in (2, 10):
            commit(local_store, step_path("train", number))
        (local_store.folder / "iterations" / "00010" / "train" / MANIFEST).unlink()
        assert local_store.latest("train")[0] == 2

    def test_a_stray_folder_disturbs_nothing(self, store: Store):
        commit(store, step_path("train", 1))
        (store.folder / "iterations" / "00001.bak").mkdir()
        assert store.latest("train")[0] == 1


class TestPrune:
    def test_keeps_the_chain_and_drops_the_files(self, store: Store):
        ref = commit(store, step_path("train", 1))
        child = commit(store, step_path("rollout", 2), parent=ref)
        store.prune(ref)
        assert store.is_pruned(ref) and not (store.folder / ref.path / "deep" / "file").exists()
        assert store.committed(ref.path) == ref and store.latest("train") == (1, ref)
        assert store.committed(child.path, parent=ref) == child
        with pytest.raises(StoreError, match="removed by retention"):
            store.read(ref)

    def test_one_that_was_killed_half_way_is_no_damage(self, store: Store):
        ref = commit(store, step_path("train", 1))
        (store.folder / ref.path / PRUNED).touch()  # the files are still there
        assert store.committed(ref.path) == ref
        store.prune(ref)
        assert not (store.folder / ref.path / "deep" / "file").exists()

    def test_only_the_owner_may(self, store: Store):
        ref = commit(store, step_path("train", 1))
        store.lease.release()
        with pytest.raises(StoreError):
            store.prune(ref)


class TestFailures:
    """Real ones, in processes of their own."""

    COMMIT = """
import os, resource, signal, sys
from pathlib import Path
from engine.store import Store
store = Store(Path(sys.argv[1]), "d" * 64)
store.lease.acquire()
"""

    @pytest.mark.parametrize("where", ["in the block", "before the rename"])
    def test_a_kill_leaves_no_step_and_its_draft_is_removed(self, tmp_path: Path, where: str):
        program = {
            "in the block": """
with store.commit("data") as draft:
    (draft.folder / "file").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
""",
            "before the rename": """
Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
with store.commit("data") as draft:
    (draft.folder / "file").write_text("whole")
""",
        }[where]
        done = programs.run(self.COMMIT + program, str(tmp_path))
        assert done.returncode == -signal.SIGKILL, done.stderr
        store = Store(tmp_path, DIGEST)
        assert store.committed("data") is None and len(store.drafts()) == 1
        with pytest.raises(StoreError):
            store.remove_drafts()
        store.lease.acquire()
        store.remove_drafts()
        assert store.drafts() == []
        commit(store, "data")

    def test_a_disk_that_is_full_is_named_and_leaves_nothing(self, tmp_path: Path):
        program = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from engine.errors import StoreError
try:
    with store.commit("data") as draft:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        (draft.folder / "file").write_bytes(b"x" * 5000)
except StoreError as error:
    print(error.exit_code, error)
print(store.drafts(), store.committed("data"))
"""
        done = programs.run(self.COMMIT + program, str(tmp_path))
        first, second = done.stdout.splitlines()
        assert first.startswith("5 Step data could not be written: File too large.") and str(tmp_path) in first
        assert second == "[] None"

    def test_a_folder_that_cannot_be_written_is_named(self, store: Store):
        store.committed("data")  # a URL is looked at before
        (store.folder / "iterations").write_text("a file in place of the folder")
        with pytest.raises(StoreError, match="could not be written") as caught:
            commit(store, step_path("rollout", 1))
        assert str(store.folder / "iterations") in str(caught.value)
        assert store.drafts() == []
