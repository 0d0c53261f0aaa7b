"""What operators expect of Prefect: retry, rerun and resume go on behind the last commit, cancel ends everything, a killed
flow is crashed and gives its slot back, overlapping runs do what their deployment says."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers import command
from tests.helpers.prefect_server import background, wait_until
from tests.helpers.team import QUICK, SECONDS_FOR_A_RUN, Team, committed, record_of, signal_flow

SECONDS_TO_CANCEL = 20
HEARTBEAT_S = 30  # Prefect takes no less
SILENT_S = 45  # after which the test's zombie counts as dead
SLOW = "from tests.helpers.slow_flow import slow\nslow()"

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1200), pytest.mark.usefixtures("worker")]


def parameters(root: Path, *overrides: str, **others: Any) -> dict[str, Any]:
    return {"root": str(root), "overrides": [*QUICK, "registry=null", *overrides], **others}


def started(root: Path, run_key: str, iteration: int = 2) -> Path:
    """Folder of a run once it has committed this iteration."""
    folder = root / run_key
    wait_until(lambda: (folder / f"iterations/{iteration:05d}/train").is_dir(), SECONDS_FOR_A_RUN, "iterations")
    return folder


def killed(team: Team, root: Path, run_key: str, iterations: int) -> tuple[str, Path]:
    """A flow run whose process was killed after two iterations, and its folder."""
    given = parameters(root, f"iterations={iterations}", run_key=run_key)
    flow_run = team.flow_run("rlhf/rlhf-on-demand", given)
    folder = started(root, run_key)
    signal_flow(folder)
    assert team.ended(flow_run) == "CRASHED"
    return flow_run, folder


def test_retry_rerun_and_resume_go_on_behind_the_last_commit(team: Team, tmp_path: Path):
    """Three ways to continue, one after the other on one run that is killed in between; no step is ever made twice."""
    flow_run, folder = killed(team, tmp_path, "thrice", iterations=60)
    first = committed(folder)

    team.post(f"flow_runs/{flow_run}/set_state", state={"type": "SCHEDULED", "name": "AwaitingRetry"}, force=True)
    started(tmp_path, "thrice", len([step for step in first if step.endswith("train")]) + 2)
    signal_flow(folder)
    wait_until(lambda: team.state(flow_run) == "CRASHED", SECONDS_FOR_A_RUN, "the retry is crashed")
    second = committed(folder)
    assert first.items() <= second.items() and len(second) > len(first)
    rollout_3 = "Cached" if "iterations/00003/rollout" in first else "Completed"  # the kill fell before or after it
    team.shows(flow_run, data="Cached", rollout_1="Cached", train_2="Cached", rollout_3=rollout_3)

    again = team.flow_run("rlhf/rlhf-on-demand", parameters(tmp_path, "iterations=60", run_key="thrice"))
    started(tmp_path, "thrice", len([step for step in second if step.endswith("train")]) + 2)
    signal_flow(folder)
    assert team.ended(again) == "CRASHED"
    third = committed(folder)
    assert second.items() <= third.items() and len(third) > len(second)
    team.shows(again, data="Cached", rollout_1="Cached", train_3="Cached")

    done = command.result_of("resume", "thrice", "--root", str(tmp_path), cwd=tmp_path)
    assert third.items() <= committed(folder).items()
    assert (done["status"], done["iterations_done"]) == ("completed", 60)
    said = (tmp_path / "command.err").read_text()
    assert f"{len(third)} steps are reused (data, start, evaluation/00000, " in said
    plans = [attempt["plan"] for attempt in record_of(folder)["attempts"]]
    assert plans[0] is None
    for plan, before in zip(plans[1:], (first, second, third), strict=True):
        step = plan.rpartition("first step to run: ")[2]
        assert step not in before and step in committed(folder)


def test_a_step_that_was_altered_is_made_again_with_those_behind_it(team: Team, tmp_path: Path):
    _, folder = killed(team, tmp_path, "altered", iterations=12)
    before = committed(folder)
    with next((folder / "iterations/00002/rollout").glob("*.safetensors")).open("ab") as stream:
        stream.write(b"x")
    again = team.flow_run("rlhf/rlhf-on-demand", parameters(tmp_path, "iterations=12", run_key="altered"))
    assert team.ended(again) == "COMPLETED"
    after = committed(folder)
    made_again = {step for step in before if after[step] != before[step]}
    assert {"iterations/00002/rollout", "iterations/00002/train"} <= made_again
    assert not {"data", "start", "iterations/00001/train"} & made_again
    team.shows(again, train_1="Cached", rollout_2="Completed")


@pytest.mark.parametrize("grace_s", [0, 600])
def test_cancel_ends_the_run_and_nothing_is_committed_after_it(team: Team, tmp_path: Path, grace_s: int):
    """Seconds of grace are for machines that are taken away; an operator's word is taken at once."""
    given = parameters(tmp_path, "iterations=500", f"checkpoint.grace_s={grace_s}", run_key="cancelled")
    flow_run = team.flow_run("rlhf/rlhf-on-demand", given)
    folder = started(tmp_path, "cancelled")
    team.prefect("flow-run", "cancel", flow_run)
    cancelled_at = time.time()
    assert team.ended(flow_run, seconds=SECONDS_TO_CANCEL) == "CANCELLED"
    wait_until(lambda: record_of(folder)["attempts"][-1]["status"] == "cancelled", SECONDS_TO_CANCEL, "the note")
    assert max(committed(folder).values()) < cancelled_at + 2 and not (folder / "OWNER").exists()
    assert team.artifacts("cancelled-failure")


def test_a_flow_whose_machine_died_is_crashed_and_another_one_takes_its_slot(team: Team, tmp_path: Path):
    """The worker dies with its flow, so nobody is left to say so; the automation notices the silence."""
    slow = team.environment | {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S)}
    team.python("-c", f"from deployments.bootstrap import bootstrap; bootstrap({{}}, silent_s={SILENT_S})")
    try:
        with background([sys.executable, "-c", SLOW], slow, tmp_path / "flow.log", cwd=command.ROOT) as process:
            wait_until(lambda: bool(_runs_of(team, "slow", "RUNNING")), 120, "the slow flow runs")
            (flow_run,) = _runs_of(team, "slow", "RUNNING")
            time.sleep(1.5 * SILENT_S)  # slow, but heard of
            assert team.state(flow_run) == "RUNNING"
            process.kill()
            wait_until(lambda: team.state(flow_run) == "CRASHED", 6 * SILENT_S, "the silence is noticed")
    finally:
        team.python("-m", "deployments.bootstrap")  # with its own patience


def _runs_of(team: Team, flow: str, state: str) -> list[str]:
    found = team.post(
        "flow_runs/filter", flows={"name": {"any_": [flow]}}, flow_runs={"state": {"type": {"any_": [state]}}}
    )
    return [item["id"] for item in found]


def test_sigterm_lets_the_present_step_commit_and_suspends_the_run(team: Team, tmp_path: Path):
    given = parameters(tmp_path, "iterations=12", "checkpoint.grace_s=60", run_key="preempted")
    flow_run = team.flow_run("rlhf/rlhf-on-demand", given)
    folder = started(tmp_path, "preempted")
    signal_flow(folder, signal.SIGTERM)
    wait_until(lambda: team.state(flow_run) == "PAUSED", SECONDS_TO_CANCEL, "the flow run is suspended")
    wait_until(lambda: record_of(folder)["attempts"][-1]["status"] == "suspended", SECONDS_TO_CANCEL, "the note")
    before = committed(folder)
    assert not list(folder.glob(".tmp-*")) and not (folder / "OWNER").exists()
    team.python("-c", f"from prefect.flow_runs import resume_flow_run; resume_flow_run({flow_run!r})")
    assert team.ended(flow_run) == "COMPLETED"
    assert before.items() <= committed(folder).items()
    assert record_of(folder)["attempts"][-1]["status"] == "completed"


def test_a_run_that_would_repeat_a_registered_one_is_a_recorded_no_op(team: Team, tmp_path: Path):
    given = {"root": str(tmp_path), "overrides": QUICK, "skip_if_registered": True}
    assert team.ended(team.flow_run("rlhf/rlhf-on-demand", given)) == "COMPLETED"
    (made,) = tmp_path.glob("*/run.json")
    again = team.flow_run("rlhf/rlhf-on-demand", given)
    assert team.ended(again) == "COMPLETED"
    state = team.get(f"flow_runs/{again}")["state"]
    assert state["name"] == "AlreadyRegistered" and "models:/smoke/1" in state["message"]
    assert [made] == list(tmp_path.glob("*/run.json"))
    other = given | {"overrides": [*QUICK, "seed=8"]}
    assert team.ended(team.flow_run("rlhf/rlhf-on-demand", other)) == "COMPLETED"
    assert len(list(tmp_path.glob("*/run.json"))) == 2

    config = str(command.SMOKE)
    sets = [part for option in QUICK for part in ("--set", option)]
    done = command.result_of("run", config, "--skip-if-registered", "--set", f"root={tmp_path}", *sets, cwd=tmp_path)
    assert done["model"]["version"] == 1 and done["run_dir"] is None


def test_overlapping_runs_are_skipped_queued_or_replaced(team: Team, tmp_path: Path):
    file = tmp_path / "prefect.yaml"
    content = yaml.safe_load((command.ROOT / "prefect.yaml").read_text())
    (base,) = [item for item in content["deployments"] if item["name"] == "rlhf-on-demand"]
    base["work_pool"] = {**base["work_pool"], "work_queue_name": "default"}
    content["deployments"] = [
        {**base, "name": "skip", "concurrency_limit": {"limit": 1, "collision_strategy": "CANCEL_NEW"}},
        {**base, "name": "queue", "concurrency_limit": {"limit": 1, "collision_strategy": "ENQUEUE"}},
        {**base, "name": "replace", "parameters": {**base["parameters"], "cancel_earlier": True}},
    ]
    file.write_text(yaml.safe_dump(content))
    team.prefect("deploy", "--all", "--prefect-file", str(file))

    long = parameters(tmp_path, "iterations=500", run_key="old")
    short = parameters(tmp_path, "iterations=1", run_key="new")
    old = team.flow_run("rlhf/skip", long)
    started(tmp_path, "old")
    assert team.ended(team.flow_run("rlhf/skip", short)) == "CANCELLED" and team.state(old) == "RUNNING"
    team.prefect("flow-run", "cancel", old)
    assert team.ended(old) == "CANCELLED"

    old = team.flow_run("rlhf/replace", {**long, "run_key": "replaced"})
    started(tmp_path, "replaced")
    new = team.flow_run("rlhf/replace", {**short, "run_key": "replacing"})
    assert team.ended(new) == "COMPLETED" and team.state(old) == "CANCELLED"

    old = team.flow_run("rlhf/queue", {**parameters(tmp_path, "iterations=20", run_key="first")})
    started(tmp_path, "first")
    new = team.flow_run("rlhf/queue", {**short, "run_key": "second"})
    assert team.ended(old) == "COMPLETED" and team.ended(new) == "COMPLETED"
    assert min(committed(tmp_path / "second").values()) > max(committed(tmp_path / "first").values())


def test_maintenance_closes_what_died_and_leaves_the_living_alone(team: Team, tmp_path: Path):
    sets = [part for option in QUICK for part in ("--set", option)]
    arguments = ["run", str(command.SMOKE), "--run-key", "dead", "--set", f"root={tmp_path}", "registry=null"]
    process = command.start(*arguments, "--set", "iterations=500", *sets, cwd=tmp_path)
    try:
        folder = started(tmp_path, "dead")
        process.kill()
        process.wait()
    finally:
        process.kill()
    done = team.flow_run("maintenance/maintenance", {"root": str(tmp_path)})
    assert team.ended(done) == "COMPLETED"
    assert record_of(folder)["attempts"][-1]["status"] == "lost" and not (folder / "OWNER").exists()
    (table,) = team.artifacts("maintenance")
    assert "1 attempts closed" in table["data"]


def test_repair_marks_a_killed_run_of_the_command_as_crashed(tmp_path: Path):
    """The embedded server's page shows no run as running for ever."""
    sets = [part for option in QUICK for part in ("--set", option)]
    arguments = ["run", str(command.SMOKE), "--run-key", "dead", "--set", f"root={tmp_path}", "registry=null"]
    process = command.start(*arguments, "--set", "iterations=500", *sets, cwd=tmp_path)
    try:
        folder = started(tmp_path, "dead")
    finally:
        process.kill()
        process.wait()
    flow_run = record_of(folder)["attempts"][-1]["flow_run"]
    assert "1 attempts closed" in command.hybridflow("repair", "--root", str(tmp_path), cwd=tmp_path)
    database = tmp_path / ".prefect" / "prefect.db"
    program = "import sqlite3, sys; print(sqlite3.connect(sys.argv[1]).execute('select id, state_type from flow_run').fetchall())"
    found = subprocess.run(
        [sys.executable, "-c", program, str(database)], capture_output=True, text=True, check=True
    ).stdout
    assert flow_run.replace("-", "") in found.replace("-", "") and "CRASHED" in found and "RUNNING" not in found
