"""The stack of a production installation on one machine: Prefect and MLflow on Postgres, a worker, a Ray cluster of its own;
a deployed run goes through it from end to end while the Prefect server is restarted."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from mlflow import MlflowClient

from tests.helpers.command import ROOT
from tests.helpers.postgres import binaries, postgres
from tests.helpers.prefect_server import background, wait_until
from tests.helpers.team import Team, committed

SECONDS_TO_START, SECONDS_FOR_A_RUN = 180, 900

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(binaries() is None, reason="no Postgres programs here: apt-get install postgresql"),
    pytest.mark.skipif(importlib.util.find_spec("psycopg2") is None, reason="psycopg2 is missing: make install"),
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def prefect_server(environment: dict[str, str], log: Path) -> Iterator[None]:
    """A Prefect server on the database and port that its environment names."""
    port = environment["PREFECT_API_URL"].rsplit(":", 1)[1].removesuffix("/api")
    with background([sys.executable, "-m", "prefect", "server", "start", "--port", port], environment, log):
        wait_until(lambda: answers(f"{environment['PREFECT_API_URL']}/health"), SECONDS_TO_START, "Prefect answers")
        yield


@contextmanager
def mlflow_server(database: str, folder: Path) -> Iterator[str]:
    """Address of an MLflow server whose runs are in Postgres and whose files are served by itself."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--port", str(port)]
    command += [
        "--backend-store-uri",
        f"postgresql+psycopg2://{database}/mlflow",
        "--artifacts-destination",
        str(folder / "files"),
    ]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with background(command, environment, folder / "mlflow.log"):
        wait_until(lambda: answers(f"{url}/health"), SECONDS_TO_START, "MLflow answers")
        yield url


@contextmanager
def ray_cluster(folder: Path) -> Iterator[str]:
    """Address of a cluster that was started by hand, with two processors; all its processes end with the block."""
    address = f"127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", str(port)]
    command += ["--num-cpus", "2", "--include-dashboard", "false", "--object-store-memory", str(200 * 1024**2)]
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    with background(command, environment, folder / "ray.log"):
        asked = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]

        def up() -> bool:
            return subprocess.run(asked, env=environment, capture_output=True, timeout=60, check=False).returncode == 0

        wait_until(up, SECONDS_TO_START, "Ray answers")
        yield address


def test_a_deployed_run_goes_through_while_the_prefect_server_is_restarted(tmp_path: Path):
    with ExitStack() as stack:
        database = stack.enter_context(postgres("prefect", "mlflow"))
        tracking = stack.enter_context(mlflow_server(database, tmp_path))
        ray = stack.enter_context(ray_cluster(tmp_path))
        own = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT", "MLFLOW", "RAY_"))}
        environment = own | {
            "PREFECT_HOME": str(tmp_path / "prefect"),
            "PREFECT_API_URL": f"http://127.0.0.1:{free_port()}/api",
            "PREFECT_API_DATABASE_CONNECTION_URL": f"postgresql+asyncpg://{database}/prefect",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_UI_ENABLED": "false",
            "HF_HUB_OFFLINE": "1",
            "RAY_ADDRESS": ray,
            "RAY_AUTH_MODE": "disabled",
        }
        team = Team(environment)
        with prefect_server(environment, tmp_path / "prefect-1.log"):
            team.deploy()
            worker = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "hybridflow"]
            stack.enter_context(background(worker, environment, tmp_path / "worker.log", cwd=tmp_path))
            overrides = [f"registry.tracking_uri={tracking}", "iterations=6", "placement.timeout_s=120"]
            given = {"root": str(tmp_path / "runs"), "run_key": "stack", "overrides": overrides}
            flow_run = team.flow_run("rlhf/rlhf-on-demand", given)
            folder = tmp_path / "runs" / "stack"
            wait_until(lambda: (folder / "iterations/00002/train").is_dir(), SECONDS_FOR_A_RUN, "two iterations")
        before = committed(folder)
        with prefect_server(environment, tmp_path / "prefect-2.log"):
            assert team.ended(flow_run, SECONDS_FOR_A_RUN) == "COMPLETED", said(tmp_path)
            assert before.items() <= committed(folder).items()
            result = json.loads((folder / "report.json").read_text())
            assert result["status"] == "completed" and result["iterations_done"] == 6
            assert team.artifacts("stack-report") and team.artifacts("stack-iterations")
        champion = MlflowClient(tracking, tracking).get_model_version_by_alias("smoke", "champion")
        assert champion.tags["run_key"] == "stack"


def said(folder: Path) -> str:
    """The last words of every process of the stack."""
    return "\n".join(
        f"== {log.name}\n{log.read_text(errors='replace')[-2500:]}" for log in sorted(folder.glob("*.log"))
    )
