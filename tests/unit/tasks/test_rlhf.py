"""The flow under a real Prefect server, with a session that has no workers: order, skipping, resuming, failing, rejecting."""

import errno
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, TaskRun
from prefect.states import Running

from engine.errors import ConfigError, DivergedError, StoreError, TransientError
from engine.runs import open_run, read_record
from engine.store import StepRef
from flows.evaluate import evaluate
from flows.rlhf import rlhf
from tasks import attempts
from tasks.data import start_run
from tasks.embedded import EmbeddedServer
from tasks.refs import RunRef, opened, remember
from tasks.report import summarise
from tests.unit.tasks.fake_session import FakeSession

pytestmark = pytest.mark.usefixtures("prefect", "fake_session")

ALL = [
    "start",
    "evaluation/00000",
    "iterations/00001/rollout",
    "iterations/00001/train",
    "iterations/00002/rollout",
    "iterations/00002/train",
    "evaluation/00002",
]
SECONDS_TO_RECORD = 60
Options = Callable[..., dict[str, Any]]


def folder_of(options: dict[str, Any], run_key: str) -> Path:
    return Path(options["root"]) / run_key


def forget(options: dict[str, Any], run_key: str) -> None:
    """As if another process continued the run: nothing is remembered of it."""
    remember(open_run(options["root"], run_key))


def last_flow_run() -> FlowRun:
    with get_client(sync_client=True) as client:
        return max(client.read_flow_runs(), key=lambda flow_run: flow_run.created)


def task_runs(flow_run: FlowRun) -> list[TaskRun]:
    """The recorded tasks of a flow run; Prefect records them a moment after they ended."""
    wanted = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id]))
    with get_client(sync_client=True) as client:
        for _ in range(SECONDS_TO_RECORD):
            found = client.read_task_runs(flow_run_filter=wanted)
            if len(found) == 9 and all(run.state and run.state.is_final() for run in found):
                break
            time.sleep(1)
    return found


def artifacts(key: str) -> list[Any]:
    with get_client(sync_client=True) as client:
        return [found for found in client.read_artifacts() if found.key == key]


def test_the_stages_run_in_order_and_give_a_complete_result(options: Options, fake_session: type[FakeSession]):
    result = rlhf(config=options(), run_key="whole")
    assert fake_session.calls == [*ALL, "close"]
    assert result["status"] == "completed"
    assert (result["iterations_planned"], result["iterations_done"], result["iterations_reused"]) == (2, 2, 0)
    assert result["metrics"] == {"reward/score_mean": 0.2, "train/grad_norm": 0.5}  # without what was not measured
    assert result["evaluation"]["held_out"]["score_mean"] == 0.7
    assert result["evaluation"]["held_out"]["baseline_score_mean"] == 0.5
    assert result["gate"]["verdict"] == "promote" and result["model"] is None
    folder = folder_of(options(), "whole")
    assert json.loads((folder / "report.json").read_text()) == result
    assert read_record(folder)["attempts"][-1]["status"] == "completed"
    assert last_flow_run().state.is_completed()


def test_a_finished_run_is_found_finished(options: Options, fake_session: type[FakeSession]):
    first = rlhf(config=options(), run_key="again")
    fake_session.calls.clear()
    second = rlhf(run_key="again", root=options()["root"])
    assert fake_session.calls == []
    assert second["iterations_reused"] == 2
    rlhf(run_key="again", root=options()["root"])
    assert {run.state.name for run in task_runs(last_flow_run())} == {"Cached"}
    same = ("status", "weights_sha256", "metrics", "evaluation", "gate")
    assert {name: first[name] for name in same} == {name: second[name] for name in same}


def test_a_run_continues_behind_its_last_committed_step(options: Options, fake_session: type[FakeSession]):
    fake_session.failures["iterations/00002/train"] = [StoreError("the disk is full")]
    with pytest.raises(StoreError):
        rlhf(config=options(), run_key="disk")
    forget(options(), "disk")
    fake_session.calls.clear()
    result = rlhf(run_key="disk", root=options()["root"])
    assert fake_session.calls == ["iterations/00002/train", "evaluation/00002", "close"]
    assert result["iterations_reused"] == 1


def test_the_cause_is_told_even_if_the_end_cannot_be_noted(
    options: Options, fake_session: type[FakeSession], monkeypatch: pytest.MonkeyPatch
):
    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(attempts, "end_attempt", no_room)
    fake_session.failures["iterations/00002/train"] = [StoreError("the disk is full")]
    with pytest.raises(StoreError, match="the disk is full"):
        rlhf(config=options(), run_key="no-room")


@pytest.mark.parametrize("lost", ["iterations/00001/rollout", "iterations/00002/rollout"])
def test_a_lost_step_and_all_after_it_run_again(options: Options, fake_session: type[FakeSession], lost: str):
    rlhf(config=options(), run_key="lost")
    shutil.rmtree(folder_of(options(), "lost") / lost)
    fake_session.calls.clear()
    rlhf(run_key="lost", root=options()["root"])
    assert fake_session.calls == [*ALL[ALL.index(lost) :], "close"]


def test_a_step_of_changed_content_runs_again_with_all_after_it(options: Options, fake_session: type[FakeSession]):
    rlhf(config=options(), run_key="changed")
    (folder_of(options(), "changed") / "iterations/00002/rollout/parent").write_text("shorter")
    fake_session.calls.clear()
    rlhf(run_key="changed", root=options()["root"])
    assert fake_session.calls == [*ALL[4:], "close"]


def test_a_transient_failure_is_tried_again(options: Options, fake_session: type[FakeSession]):
    fake_session.failures["iterations/00001/rollout"] = [TransientError("a worker died") for _ in range(3)]
    assert rlhf(config=options(), run_key="transient")["status"] == "completed"


def test_a_transient_failure_that_stays_fails_the_run(options: Options, fake_session: type[FakeSession]):
    errors = fake_session.failures["iterations/00001/rollout"] = [TransientError("a worker died") for _ in range(9)]
    with pytest.raises(TransientError):
        rlhf(config=options(), run_key="stays")
    assert len(errors) == 5  # the first attempt and three retries


def test_a_diverged_step_is_not_tried_again(options: Options, fake_session: type[FakeSession]):
    errors = fake_session.failures["iterations/00002/train"] = [
        DivergedError("not finite", iteration=2) for _ in range(2)
    ]
    with pytest.raises(DivergedError):
        rlhf(config=options(), run_key="diverged")
    assert len(errors) == 1 and fake_session.calls[-1] == "close"
    attempt = read_record(folder_of(options(), "diverged"))["attempts"][-1]
    assert attempt["status"] == "stopped" and "not finite" in attempt["error"]
    assert last_flow_run().state.is_failed()


def test_a_failure_shows_cause_and_command(options: Options, fake_session: type[FakeSession]):
    fake_session.failures["start"] = [StoreError("the disk is full")]
    with pytest.raises(StoreError):
        rlhf(config=options(), run_key="Shown.1")
    (shown,) = artifacts("shown-1-failure")
    assert "the disk is full" in shown.data
    assert f"hybridflow resume Shown.1 --root {options()['root']}" in shown.data


def test_a_failed_run_is_free_for_the_next_attempt(options: Options, fake_session: type[FakeSession]):
    fake_session.failures["start"] = [StoreError("the disk is full")]
    with pytest.raises(StoreError):
        rlhf(config=options(), run_key="free")
    assert not (folder_of(options(), "free") / "OWNER").exists()


def test_an_interrupt_is_a_cancellation(options: Options, fake_session: type[FakeSession]):
    fake_session.failures["iterations/00001/train"] = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        rlhf(config=options(), run_key="interrupted")
    assert read_record(folder_of(options(), "interrupted"))["attempts"][-1]["status"] == "cancelled"
    assert fake_session.calls[-1] == "close"


@pytest.mark.parametrize("score", [0.5, None])
def test_a_policy_that_is_not_good_enough_is_rejected(
    options: Options, fake_session: type[FakeSession], score: float | None
):
    fake_session.scores[2] = score
    result = rlhf(config=options(), run_key="rejected")
    assert result["status"] == "rejected" and result["gate"]["verdict"] == "reject" and result["gate"]["reasons"]
    assert read_record(folder_of(options(), "rejected"))["attempts"][-1]["status"] == "rejected"


@pytest.mark.parametrize(("spread", "verdict"), [(0.0, "reject"), (0.4, "promote")])
def test_a_policy_whose_scores_never_differed_has_learned_nothing_and_is_rejected(
    options: Options, fake_session: type[FakeSession], spread: float, verdict: str
):
    fake_session.learned.update({"reward/score_mean": 0.5, "reward/score_std": spread})
    found = rlhf(config=options(), run_key="equal")["gate"]
    assert found["verdict"] == verdict
    assert (verdict == "promote") or "within each of the 2 iterations all scores were the same (0.5)" in found[
        "reasons"
    ][0]


def test_evaluations_in_between_come_every_kth_iteration(options: Options, fake_session: type[FakeSession]):
    rlhf(config=options(iterations=5, evaluation={"every": 2}), run_key="every")
    evaluations = [call for call in fake_session.calls if call.startswith("evaluation")]
    assert evaluations == [f"evaluation/0000{iteration}" for iteration in (0, 2, 4, 5)]


def test_operators_see_progress_table_and_report(options: Options):
    rlhf(config=options(), run_key="artifacts")
    assert artifacts("artifacts-progress")[0].data == 100.0
    newest = max(artifacts("artifacts-iterations"), key=lambda table: table.created)
    rows = json.loads(newest.data)
    assert [row["iteration"] for row in rows] == [1, 2] and rows[1]["train/grad_norm"] == 0.5
    assert "Gate: promote" in artifacts("artifacts-report")[0].data


def test_a_run_key_comes_from_the_flow_run_where_none_is_given(options: Options):
    """A flow run that is retried must find its own run again."""
    result = rlhf(config=options())
    assert result["run_key"].startswith("sums-") and result["run_key"].endswith(last_flow_run().id.hex[-6:])


def test_a_run_that_the_command_started_is_joined(config: Callable[..., Any], fake_session: type[FakeSession]):
    ref = start_run(config(), "joined")
    rlhf(run_key="joined", root=ref.root)
    assert len(read_record(Path(ref.root) / "joined")["attempts"]) == 1


def test_nothing_to_run_is_refused():
    with pytest.raises(ConfigError, match="run_key"):
        rlhf()


def test_the_flow_run_of_a_killed_attempt_is_closed(options: Options, fake_session: type[FakeSession]):
    """A killed process leaves its flow run running for ever; the next attempt sets that right."""
    rlhf(config=options(), run_key="killed")
    killed = last_flow_run()
    folder = folder_of(options(), "killed")
    record = read_record(folder)
    record["attempts"][-1] |= {"status": "running"}
    (folder / "run.json").write_text(json.dumps(record))
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(killed.id, Running(), force=True)
        rlhf(run_key="killed", root=options()["root"])
        (after,) = client.read_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[killed.id])))
    assert after.state.is_crashed()
    assert [attempt["status"] for attempt in read_record(folder)["attempts"]] == ["lost", "completed"]


def test_any_model_is_evaluated_on_the_suites_of_a_configuration(options: Options, model_folder: Path):
    result = evaluate(config=options(sft={"steps": 3}), source=str(model_folder), run_key="measured")
    assert result["status"] == "completed" and result["model"] == str(model_folder)
    assert result["evaluation"]["held_out"]["score_mean"] == 0.5
    folder = folder_of(options(), "measured")
    assert read_record(folder)["config"]["sft"] is None and not (folder / "iterations").exists()


def test_what_a_failed_run_did_is_summarised(options: Options, fake_session: type[FakeSession]):
    fake_session.failures["iterations/00002/rollout"] = [DivergedError("not finite")]
    with pytest.raises(DivergedError):
        rlhf(config=options(), run_key="summary")
    result = summarise(RunRef(options()["root"], "summary"), "stopped")
    assert (result["status"], result["iterations_planned"], result["iterations_done"]) == ("stopped", 2, 1)
    assert result["metrics"]["reward/score_mean"] == 0.1 and result["gate"] is None
    assert result["evaluation"]["held_out"] == {
        "score_mean": 0.5, "rows": 8, "unscored": 0, "iteration": 0, "baseline_score_mean": 0.5
    }  # fmt: skip


def test_no_secret_of_the_environment_is_written_anywhere(
    options: Options,
    fake_session: type[FakeSession],
    prefect: EmbeddedServer,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    canary = "tok-CANARY-123"
    for name in ("HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, canary)
    fake_session.failures["iterations/00001/train"] = [StoreError("the disk is full")]
    with pytest.raises(StoreError):
        rlhf(config=options(), run_key="secret")
    artifacts("secret-failure")
    root, home = Path(options()["root"]), prefect.log.parent
    files = [file for folder in (root, home) for file in folder.rglob("*") if file.is_file()]
    assert home / "prefect.db" in files and root / "secret" / "run.json" in files
    assert not [file for file in files if canary.encode() in file.read_bytes()]
    assert canary not in "".join(capfd.readouterr())


def test_a_reference_is_a_small_value():
    ref = RunRef("/runs", "key")
    assert ref == RunRef("/runs", "key") and hash(ref) == hash(RunRef("/runs", "key"))
    assert json.loads(json.dumps(vars(StepRef("data", "ab")))) == {"path": "data", "manifest_sha256": "ab"}
    with pytest.raises(ConfigError):
        opened(ref)
