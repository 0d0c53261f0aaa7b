"""Markers and order of the tests: a test is marked by its folder, quick folders run first, GPU tests need a GPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.helpers.storage import Storage

FOLDERS = ("unit", "parity", "contracts", "distributed", "e2e", "chaos", "gpu")
TESTS = Path(__file__).parent

# The same examples on every run: a red test stays red until the code changes.
settings.register_profile("hybridflow", deadline=None, derandomize=True, database=None)
settings.load_profile("hybridflow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(_folder(item))
    items.sort(key=lambda item: FOLDERS.index(_folder(item)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not _has_cuda():
        pytest.skip("no CUDA device")


def _folder(item: pytest.Item) -> str:
    folder = item.path.relative_to(TESTS).parts[0]
    if folder not in FOLDERS:
        raise pytest.UsageError(f"{item.path}: tests live in one of the folders {', '.join(FOLDERS)} of tests/")
    return folder


def _has_cuda() -> bool:
    import torch  # here, because the quick tests need no torch and it takes seconds to load

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def storage_server() -> "Iterator[Storage]":
    """An S3-compatible server of this process."""
    from tests.helpers.storage import Storage  # here, because it takes a second to load

    server = Storage()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        server.make_bucket()
    yield server
    server.stop()


@pytest.fixture
def storage(storage_server: "Storage", tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Storage":
    """The server in order and known by the environment; caches of its URLs lie in `cache`."""
    for name, value in storage_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HYBRIDFLOW_CACHE", str(tmp_path / "cache"))
    storage_server.requests.clear()
    storage_server.fails = lambda request: False
    storage_server.overwrites = False
    return storage_server
