"""The session of runs on fixed rows alone: real trainer, real store, everything in this process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from engine.dataflows.offline_roles import pair_batch
from engine.errors import StoreError
from engine.metrics import OF_THE_MACHINE
from engine.offline_session import OfflineSession
from engine.runs import policy_folder
from engine.store import StepRef, step_path
from engine.workers.score import ScoreWorker
from tests.helpers.offline import offline_run, pair

pytestmark = pytest.mark.e2e

OBJECTIVES = ["sft", "dpo", "reward_model", "cost_model"]


def walk(session: OfflineSession, data: StepRef, points: list[int]) -> StepRef:
    """Start checkpoint and training up to each of these optimiser steps; returns the last step."""
    step = session.start(data)
    for point in points:
        step = session.train(point, step)
    return step


def outcome(session: OfflineSession, step: StepRef) -> tuple[Any, ...]:
    """What must be equal between two runs: weights and all metrics that are no times."""
    manifest = session.run.store.manifest(step)
    metrics = {name: value for name, value in manifest.metrics.items() if not name.startswith(OF_THE_MACHINE)}
    return manifest.facts["sha256"], manifest.facts["steps"], metrics


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_interrupted_run_ends_exactly_like_one_that_was_not(tmp_path: Path, objective: str) -> None:
    run, data = offline_run(tmp_path, "whole", objective)
    whole = OfflineSession(run)
    last = walk(whole, data, [2, 4, 6])
    broken_run, broken_data = offline_run(tmp_path, "broken", objective)
    first = OfflineSession(broken_run)
    walk(first, broken_data, [2])
    first.close()
    second = OfflineSession(broken_run)
    assert outcome(second, walk(second, broken_data, [2, 4, 6])) == outcome(whole, last)
    assert run.store.manifest(last).facts["steps"] == 6


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_held_out_rows_are_told_apart_better_than_before(tmp_path: Path, objective: str) -> None:
    run, data = offline_run(tmp_path, "run", objective, train={"lr": 3e-3}, steps=30, checkpoint={"every": 30})
    session = OfflineSession(run)
    start = session.start(data)
    before = run.store.manifest(session.evaluate(0, start)).facts["suites"]["held_out"]
    step = session.train(30, start)
    after = run.store.manifest(session.evaluate(30, step)).facts["suites"]["held_out"]
    assert before["rows"] == after["rows"] == (5 if objective == "sft" else 8)
    assert after["score_mean"] > before["score_mean"] + 0.3
    if objective != "sft":
        assert before["score_mean"] == 0.5, "a model that prefers nothing is right by half"
        assert after["score_mean"] == 1.0 and after["margin_mean"] > 0


def test_transformers_loads_a_reward_model_and_gives_the_same_scores(tmp_path: Path) -> None:
    run, data = offline_run(tmp_path, "run", "reward_model")
    session = OfflineSession(run)
    step = walk(session, data, [6])
    batch = pair_batch([pair(index) for index in range(6)])
    ours = session._roles().model.call(ScoreWorker.compute_scores, batch).scores
    model = AutoModelForSequenceClassification.from_pretrained(policy_folder(run, step)).eval()
    with torch.no_grad():
        theirs = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()).logits.squeeze(-1)
        alone = [
            float(model(input_ids=batch.input_ids[row : row + 1, : int(length)]).logits)
            for row, length in enumerate(batch.lengths())
        ]
    assert ours.abs().max() > 0.01
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours, torch.tensor(alone), atol=1e-5, rtol=0)


def test_a_run_whose_optimiser_took_another_number_of_steps_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, data = offline_run(tmp_path, "run", "reward_model")
    session = OfflineSession(run)
    start = session.start(data)
    monkeypatch.setattr("engine.offline_session.steps_of", lambda step: 1)
    with pytest.raises(StoreError, match="1 steps where 2 were planned"):
        session.train(2, start)
    assert run.store.committed(step_path("train", 2)) is None
