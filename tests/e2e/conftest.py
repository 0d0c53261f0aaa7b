"""Shared by the end-to-end tests: one complete smoke run with real vLLM, DeepSpeed, Ray, Prefect and MLflow; one Prefect
server with the deployments, and a worker."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.controller.local_group import LocalGroup
from tests.helpers.command import SMOKE, result_of
from tests.helpers.learning import toy_scorers
from tests.helpers.prefect_server import background, team_server
from tests.helpers.team import Team
from tests.helpers.tiny import tiny_folder


@pytest.fixture(scope="session")
def smoke_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the smoke run was started; its runs and registry lie in `runs/`."""
    return tmp_path_factory.mktemp("smoke")


@pytest.fixture(scope="session")
def smoke_result(smoke_folder: Path) -> dict[str, Any]:
    """What `hybridflow run deployments/presets/smoke.yaml --run-key smoke-1 --json` printed."""
    return result_of("run", str(SMOKE), "--run-key", "smoke-1", cwd=smoke_folder)


@pytest.fixture(scope="session")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    """A Prefect server of its own, prepared and with everything of prefect.yaml deployed."""
    with team_server(tmp_path_factory.mktemp("prefect")) as environment:
        team = Team(environment | {"HF_HUB_OFFLINE": "1"})
        team.deploy()
        yield team


@pytest.fixture(scope="session")
def worker(team: Team, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A process worker somewhere else than in the checkout; gives the file with its output."""
    folder = tmp_path_factory.mktemp("worker")
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "hybridflow"]
    with background(command, team.environment, folder / "worker.log", cwd=folder):
        yield folder / "worker.log"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the toy task."""
    return tiny_folder(tmp_path_factory.mktemp("toy") / "model")


@pytest.fixture(scope="module")
def scorers(source: Path) -> Iterator[dict[str, LocalGroup]]:
    """The reward and cost groups of the toy task."""
    with toy_scorers(source) as groups:
        yield groups
