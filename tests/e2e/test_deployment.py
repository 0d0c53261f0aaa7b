"""A team's way: a Prefect server, a process worker, `prefect deploy --all`, and a run of the deployed pipeline."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from mlflow import MlflowClient

from tests.helpers.prefect_server import background, team_server, wait_until

ROOT = Path(__file__).resolve().parents[2]
SECONDS_FOR_A_RUN, SECONDS_FOR_A_HOOK = 420, 120
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
# What stays of the preset is every stage; the engines that take long to start have tests of their own.
QUICK = ["placement.mode=local", "rollout.backend=hf", "train.backend=torch"]

pytestmark = pytest.mark.timeout(900)


class Team:
    """The commands of an operator."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.url = environment["PREFECT_API_URL"]

    def prefect(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def post(self, path: str, **content: Any) -> Any:
        reply = httpx.post(f"{self.url}/{path}", json=content, timeout=30)
        reply.raise_for_status()
        return reply.json()

    def flow_run(self, deployment: str, parameters: dict[str, Any]) -> str:
        """Id of a new run of a deployment."""
        found = httpx.get(f"{self.url}/deployments/name/{deployment}", timeout=30).json()
        return str(self.post(f"deployments/{found['id']}/create_flow_run", parameters=parameters)["id"])

    def state(self, flow_run: str) -> str:
        content = httpx.get(f"{self.url}/flow_runs/{flow_run}", timeout=30).json()
        return str(content["state"]["type"])

    def artifacts(self, key: str) -> list[dict[str, Any]]:
        return [item for item in self.post("artifacts/filter") if item["key"] == key]


@pytest.fixture(scope="module")
def worker(team: Team, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A process worker somewhere else than in the checkout; gives the file with its output."""
    folder = tmp_path_factory.mktemp("worker")
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "hybridflow"]
    with background(command, team.environment, folder / "worker.log", cwd=folder):
        yield folder / "worker.log"


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    home = tmp_path_factory.mktemp("prefect")
    with team_server(home) as environment:
        team = Team(environment | {"HF_HUB_OFFLINE": "1"})
        team.prefect("work-pool", "create", "hybridflow", "--type", "process")
        team.prefect("deploy", "--all")
        yield team


def test_the_deployments_are_what_the_file_says(team: Team):
    found = {item["name"]: item for item in team.post("deployments/filter")}
    assert found.keys() == {"rlhf-nightly", "rlhf-on-demand", "evaluate-only"}
    (nightly,) = found["rlhf-nightly"]["schedules"]
    assert nightly["active"] is False and nightly["schedule"]["timezone"]
    assert all(item["work_pool_name"] == "hybridflow" for item in found.values())


def test_every_preset_that_a_deployment_names_is_there():
    for deployment in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]:
        assert (ROOT / deployment["parameters"]["config"]).is_file()


def test_a_deployed_run_ends_with_a_registered_model(team: Team, worker: Path, tmp_path: Path):
    flow_run = team.flow_run("rlhf/rlhf-on-demand", {"root": str(tmp_path / "runs"), "overrides": QUICK})
    wait_until(lambda: team.state(flow_run) in FINAL, SECONDS_FOR_A_RUN, "the flow run ends")
    assert team.state(flow_run) == "COMPLETED", worker.read_text()[-5000:]
    (report,) = (tmp_path / "runs").glob("*/report.json")
    result = json.loads(report.read_text())
    assert result["status"] == "completed" and result["iterations_done"] == 3
    registry = f"sqlite:///{tmp_path}/runs/mlflow.db"
    champion = MlflowClient(registry, registry).get_model_version_by_alias("smoke", "champion")
    assert champion.tags["run_key"] == result["run_key"]


def test_a_killed_run_is_noted_by_the_worker_and_continued_by_a_retry(team: Team, worker: Path, tmp_path: Path):
    """The flow's own process cannot say anything any more; the retry finds the run again and keeps what was committed."""
    parameters = {"root": str(tmp_path / "runs"), "overrides": [*QUICK, "iterations=20", "registry=null"]}
    flow_run = team.flow_run("rlhf/rlhf-on-demand", parameters)
    wait_until(lambda: any((tmp_path / "runs").glob("*/iterations/00002/train")), SECONDS_FOR_A_RUN, "two iterations")
    (folder,) = (path.parent for path in (tmp_path / "runs").glob("*/run.json"))
    os.kill(json.loads((folder / "run.json").read_text())["attempts"][-1]["pid"], signal.SIGKILL)
    wait_until(lambda: team.state(flow_run) in FINAL, SECONDS_FOR_A_RUN, "the worker sees the end")
    assert team.state(flow_run) == "CRASHED"
    wait_until(lambda: bool(team.artifacts(f"{folder.name}-failure")), SECONDS_FOR_A_HOOK, "the hook's artifact")
    assert f"hybridflow resume {folder.name}" in team.artifacts(f"{folder.name}-failure")[0]["data"]
    assert json.loads((folder / "run.json").read_text())["attempts"][-1]["status"] == "failed"

    team.prefect("flow-run", "retry", flow_run)
    wait_until(lambda: (folder / "report.json").is_file(), SECONDS_FOR_A_RUN, "the retry ends")
    result = json.loads((folder / "report.json").read_text())
    assert result["iterations_done"] == 20 and result["iterations_reused"] >= 2
    assert [path.name for path in (tmp_path / "runs").glob("*/run.json")] == ["run.json"], worker.read_text()[-5000:]
