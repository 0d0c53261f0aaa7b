"""A team's way: a Prefect server, a process worker, `prefect deploy --all`, and a run of the deployed pipeline."""

import json
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient

from tests.helpers.command import ROOT
from tests.helpers.prefect_server import wait_until
from tests.helpers.team import QUICK, SECONDS_FOR_A_RUN, Team, record_of, signal_flow

SECONDS_FOR_A_HOOK = 120

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_the_deployments_are_what_the_file_says(team: Team):
    found = {item["name"]: item for item in team.post("deployments/filter")}
    assert found.keys() == {
        *("rlhf-nightly", "rlhf-on-demand", "evaluate-only", "sft", "reward-model"),
        *("promote", "rollback", "maintenance"),
    }
    for name in ("rlhf-nightly", "maintenance"):
        (schedule,) = found[name]["schedules"]
        assert schedule["active"] is False and schedule["schedule"]["timezone"]
    strategies = {name: (item["concurrency_options"] or {}).get("collision_strategy") for name, item in found.items()}
    assert strategies["rlhf-nightly"] == strategies["maintenance"] == "CANCEL_NEW"
    assert strategies["promote"] == strategies["rollback"] == "ENQUEUE" and strategies["rlhf-on-demand"] is None
    assert found["rlhf-nightly"]["work_queue_name"] == "training" and found["promote"]["work_queue_name"] == "default"
    assert all(item["work_pool_name"] == "hybridflow" for item in found.values())


def test_every_preset_that_a_deployment_names_is_there():
    for deployment in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]:
        if config := deployment.get("parameters", {}).get("config"):
            assert (ROOT / config).is_file()


def test_the_bootstrap_can_be_repeated_and_keeps_secrets_out_of_the_job_template(team: Team):
    first = team.python("-m", "deployments.bootstrap", HYBRIDFLOW_SECRET_SCORER_TOKEN="tok-CANARY-123")
    again = team.python("-m", "deployments.bootstrap")
    assert first == again and "secret SCORER_TOKEN from block hybridflow-scorer-token" in again
    template = json.dumps(team.get("work_pools/hybridflow")["base_job_template"])
    assert "{{ prefect.blocks.secret.hybridflow-scorer-token }}" in template and "CANARY" not in template + first
    assert team.get("work_pools/hybridflow/queues/training")["concurrency_limit"] == 1
    assert len([item for item in team.post("automations/filter") if "fell silent" in item["name"]]) == 1


def test_a_deployed_run_ends_with_a_registered_model(team: Team, worker: Path, tmp_path: Path):
    flow_run = team.flow_run("rlhf/rlhf-on-demand", {"root": str(tmp_path / "runs"), "overrides": QUICK})
    assert team.ended(flow_run) == "COMPLETED", worker.read_text()[-5000:]
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
    signal_flow(folder)
    assert team.ended(flow_run) == "CRASHED"
    wait_until(lambda: bool(team.artifacts(f"{folder.name}-failure")), SECONDS_FOR_A_HOOK, "the hook's artifact")
    assert f"hybridflow resume {folder.name}" in team.artifacts(f"{folder.name}-failure")[0]["data"]
    assert record_of(folder)["attempts"][-1]["status"] == "failed"

    team.prefect("flow-run", "retry", flow_run)
    wait_until(lambda: (folder / "report.json").is_file(), SECONDS_FOR_A_RUN, "the retry ends")
    result = json.loads((folder / "report.json").read_text())
    assert result["iterations_done"] == 20 and result["iterations_reused"] >= 2
    assert [path.name for path in (tmp_path / "runs").glob("*/run.json")] == ["run.json"], worker.read_text()[-5000:]
