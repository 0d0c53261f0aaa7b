"""What an operator and their tools do with a Prefect server: commands, requests, waiting for states."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from tests.helpers.command import ROOT
from tests.helpers.prefect_server import wait_until

SECONDS_FOR_A_RUN, SECONDS_TO_RECORD, SECONDS_OF_A_LOCK = 420, 60, 60
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
# What stays of the preset is every stage; the engines that take long to start have tests of their own.
QUICK = ["placement.mode=local", "rollout.backend=hf", "train.backend=torch"]


class Team:
    """The commands of an operator."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.url = environment["PREFECT_API_URL"]

    def prefect(self, *arguments: str) -> str:
        return self.python("-m", "prefect", "--no-prompt", *arguments)

    def python(self, *arguments: str, **environment: str) -> str:
        """Standard output of `python ARGUMENTS` in the checkout, which must succeed."""
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def deploy(self) -> None:
        """As README says: the server is prepared, then the file is deployed."""
        self.python("-m", "deployments.bootstrap")
        self.prefect("deploy", "--all")

    def post(self, path: str, **content: Any) -> Any:
        """A request, repeated as Prefect's own client does while the server's SQLite file is locked (503)."""
        deadline = time.monotonic() + SECONDS_OF_A_LOCK
        while (reply := httpx.post(f"{self.url}/{path}", json=content, timeout=30)).status_code == 503:
            assert time.monotonic() < deadline, reply.text
            time.sleep(1.0)
        reply.raise_for_status()
        return reply.json()

    def get(self, path: str) -> Any:
        reply = httpx.get(f"{self.url}/{path}", timeout=30)
        reply.raise_for_status()
        return reply.json()

    def flow_run(self, deployment: str, parameters: dict[str, Any]) -> str:
        """Id of a new run of a deployment."""
        found = self.get(f"deployments/name/{deployment}")
        return str(self.post(f"deployments/{found['id']}/create_flow_run", parameters=parameters)["id"])

    def state(self, flow_run: str) -> str:
        return str(self.get(f"flow_runs/{flow_run}")["state"]["type"])

    def ended(self, flow_run: str, seconds: float = SECONDS_FOR_A_RUN) -> str:
        """The state that a flow run ends in."""
        wait_until(lambda: self.state(flow_run) in FINAL, seconds, f"the end of {flow_run}")
        return self.state(flow_run)

    def task_states(self, flow_run: str) -> dict[str, str]:
        """Name of the task run -> name of its last state, of the newest task run of each name."""
        found = self.post(
            "task_runs/filter", flow_runs={"id": {"any_": [flow_run]}}, sort="EXPECTED_START_TIME_ASC", limit=200
        )
        return {item["name"]: item["state_name"] for item in found}

    def shows(self, flow_run: str, **states: str) -> None:
        """Wait until the page shows these task runs (train_1 for train-1) in these states; it is told of them later."""
        wanted = {name.replace("_", "-"): state for name, state in states.items()}
        wait_until(
            lambda: wanted.items() <= self.task_states(flow_run).items(),
            SECONDS_TO_RECORD,
            f"{flow_run} shows {wanted}",
        )

    def artifacts(self, key: str) -> list[dict[str, Any]]:
        return [item for item in self.post("artifacts/filter") if item["key"] == key]


def record_of(folder: Path) -> dict[str, Any]:
    """run.json of a run directory."""
    content: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return content


def signal_flow(folder: Path, number: int = signal.SIGKILL) -> None:
    """Send a signal to the process that works on a run."""
    os.kill(record_of(folder)["attempts"][-1]["pid"], number)


def committed(folder: Path) -> dict[str, float]:
    """Step -> time of its commit (seconds since the epoch), of all steps of a run that are committed now."""
    files = folder.rglob("MANIFEST.json")
    return {
        file.parent.relative_to(folder).as_posix(): json.loads(file.read_text())["committed_at"]
        for file in files
        if not file.relative_to(folder).parts[0].startswith(".")
    }
