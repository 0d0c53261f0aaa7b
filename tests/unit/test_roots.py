"""Roots that are URLs: what cannot work, or would give secrets away, is refused before anything is started."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.loading import load_config
from engine.remote import require_place
from engine.remote_store import store_in
from engine.roots import MARK, absolute_root, local_root, mark_cache, root_of, root_problem, url_of
from engine.store import Store
from tests.helpers import programs
from tests.helpers.command import SMOKE
from tests.helpers.storage import Storage


@pytest.mark.parametrize(
    "root", ["s3://key:secret@bucket/x", "s3://key:sec/ret@bucket/x", "s3://bucket/x?secret=1", "gs://me:secret@bucket"]
)
def test_credentials_are_refused_and_not_repeated(root: str):
    with pytest.raises(ConfigError, match="holds credentials") as caught:
        load_config(SMOKE, [f"root={root}", "registry=null"])
    assert "secret" not in str(caught.value) and "sec/ret" not in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize("root", ["memory://x", "https://host/x", "sftp://host/x", "none://x"])
def test_a_protocol_that_cannot_create_exclusively_is_refused(root: str):
    with pytest.raises(ConfigError, match="created exclusively") as caught:
        load_config(SMOKE, [f"root={root}", "registry=null"])
    assert "s3://" in str(caught.value)


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    problem = root_problem("s3://bucket/x")
    assert problem is not None and "s3fs" in problem.remedy and "hybridflow[s3]" in problem.remedy


@pytest.mark.parametrize("root", ["s3://", "s3:///", "file:///"])
def test_a_url_of_nothing_is_refused(root: str):
    with pytest.raises(ConfigError, match="names no bucket"):
        absolute_root(root)


def test_the_registry_needs_an_address_of_its_own():
    with pytest.raises(ConfigError, match=r"registry\.tracking_uri"):
        load_config(SMOKE, ["root=s3://bucket/x"])
    assert (
        load_config(SMOKE, ["root=s3://bucket/x", "registry.tracking_uri=http://mlflow:5000"]).root == "s3://bucket/x"
    )


def test_equal_urls_have_one_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HYBRIDFLOW_CACHE", str(tmp_path))
    assert local_root("s3://bucket/x") == local_root("s3a://bucket/x/") != local_root("s3://bucket/y")
    assert local_root("s3://bucket/x").parent == tmp_path and "bucket-x" in local_root("s3://bucket/x").name
    assert local_root("runs") == Path("runs").absolute()


def test_a_cache_named_as_a_folder_is_still_that_of_its_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HYBRIDFLOW_CACHE", str(tmp_path))
    folder = local_root("s3://bucket/x")
    mark_cache(folder)
    moved = tmp_path / "moved"
    folder.rename(moved)  # as another process, which never heard of the URL
    assert url_of(moved) == root_of(moved / "run") == "s3://bucket/x" and (moved / MARK).is_file()
    assert root_of(tmp_path / "runs" / "run") == str(tmp_path / "runs")


def test_a_bucket_that_is_not_there(storage: Storage):
    with pytest.raises(ConfigError, match="bucket does not exist") as caught:
        require_place("s3://nowhere/x")
    assert caught.value.exit_code == 2


def test_a_server_that_is_not_there(storage: Storage, monkeypatch: pytest.MonkeyPatch):
    root = storage.new_root()
    storage.stop()
    try:
        with pytest.raises(ConfigError, match="Could not connect"):
            require_place(root)
    finally:
        storage.start()
    require_place(root)


def test_storage_that_overwrites_where_it_must_not(storage: Storage):
    storage.overwrites = True
    with pytest.raises(ConfigError, match="two machines might both write"):
        require_place(storage.new_root())


def test_a_folder_behind_a_url(tmp_path: Path):
    require_place(f"file://{tmp_path}/there")
    assert list((tmp_path / "there").iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_that_may_not_be_written(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="refused"):
        require_place(f"file://{tmp_path}/there")


def test_local_roots_load_no_file_system(tmp_path: Path):
    program = """
import sys
from pathlib import Path
from engine.preflight import preflight
from engine.remote import require_place
from engine.remote_store import store_in
require_place("runs")
store = store_in(Path(sys.argv[1]), "d" * 64)
store.lease.acquire()
with store.commit("data") as draft:
    (draft.folder / "file").write_text("x")
print(store.read(draft.ref), type(store).__name__, [name for name in ("fsspec", "s3fs", "botocore") if name in sys.modules])
"""
    done = programs.run(program, str(tmp_path))
    assert done.stdout.split() == [str(tmp_path / "data"), "Store", "[]"], done.stderr


def test_a_local_store_is_as_ever(tmp_path: Path):
    assert type(store_in(tmp_path / "run", "d" * 64)) is Store and "s3fs" not in vars(sys.modules["engine.store"])


def test_only_text_is_needed_to_refuse(monkeypatch: pytest.MonkeyPatch):
    """Nothing is asked over the network while a configuration is loaded."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr("engine.remote.Place.__init__", never)
    assert load_config(SMOKE, ["root=s3://bucket/x", "registry=null"]).root == "s3://bucket/x"
