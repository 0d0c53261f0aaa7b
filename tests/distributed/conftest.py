"""One Ray cluster for all tests that ask for it; sessions that end with their test; two ranks of torch.distributed."""

import os
from collections.abc import Iterator

import pytest

from engine.session import Session
from tests.helpers.clusters import cluster_of
from tests.helpers.processes import Ranks


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """A cluster of one node with 16 CPUs, more than this machine has, and two units of a resource of its own."""
    with cluster_of({"CPU": 16, "scratch": 2}) as address:
        yield address


@pytest.fixture
def on_cluster(ray_address: str) -> Iterator[None]:
    """Runs of this test use that cluster."""
    os.environ["RAY_ADDRESS"] = ray_address
    yield
    del os.environ["RAY_ADDRESS"]


@pytest.fixture
def sessions() -> Iterator[list[Session]]:
    """Sessions to be closed at the end, whatever happened."""
    opened: list[Session] = []
    yield opened
    for session in opened:
        session.close()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two processes of one gloo group."""
    group = Ranks(2, tmp_path_factory.mktemp("ranks") / "rendezvous")
    yield group
    group.close()
