"""Samples without a score: judged over a whole step, listed where the operator finds them."""

import json
import logging
from pathlib import Path

import pytest
import torch

from engine.batch import Batch
from engine.controller.dispatch import DP
from engine.controller.mesh import Mesh
from engine.dataflows.description import describe
from engine.errors import TransientError
from engine.experience import load_experience, save_experience
from engine.unscored import check_unscored

STEP = "iterations/00002/rollout"


def batch(reasons: dict[int, dict[str, str]], rows: int = 8) -> Batch:
    """Two components of weight 1; the named ones gave no score, all others a half."""
    names = ("math", "judge")
    components = [{name: None if name in reasons.get(row, {}) else 0.5 for name in names} for row in range(rows)]
    scores = [torch.nan if row in reasons else 1.0 for row in range(rows)]
    return Batch(
        {
            "scores": torch.tensor(scores),
            "group_ids": torch.arange(rows) // 2,
            "response_lengths": torch.ones(rows, dtype=torch.int64),
            "response_mask": torch.ones(rows, 1, dtype=torch.bool),
            "old_logprobs": torch.full((rows, 1), -1.5),
            "finish_reason": torch.zeros(rows, dtype=torch.int8),
        },
        {
            "components": components,
            "unscored": [reasons.get(row, {}) for row in range(rows)],
            "prompt": [f"prompt {row}" for row in range(rows)],
            "response": [f"response {row}" for row in range(rows)],
            "answer": [str(row) for row in range(rows)],
        },
    )


TWO = {3: {"math": "it raised", "judge": "silence"}, 6: {"judge": "silence\nand more"}}


def listed(file: Path) -> list[tuple[int, str]]:
    return [(row["sample"], row["component"]) for row in map(json.loads, file.read_text().splitlines())]


def test_nothing_is_said_where_every_sample_has_a_score(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_unscored(batch({}), 0.0, tmp_path, STEP)
    assert caplog.text == "" and list(tmp_path.iterdir()) == []


def test_the_share_itself_is_still_allowed_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_unscored(batch(TWO), 0.25, tmp_path, STEP)
    found = caplog.text
    assert f"{STEP}: 2 of 8 samples have no score (math 1, judge 2)" in found
    assert "sample 3, component math: it raised" in found
    assert list(tmp_path.iterdir()) == []


def test_above_the_share_the_step_fails_and_leaves_the_samples_behind(tmp_path: Path) -> None:
    with pytest.raises(TransientError) as caught:
        check_unscored(batch(TWO), 0.24, tmp_path, STEP)
    file = tmp_path / "unscored-iterations-00002-rollout.jsonl"
    assert "max_unscored_share allows 0.24, but 2 of 8 samples" in str(caught.value) and str(file) in str(caught.value)
    assert listed(file) == [(3, "math"), (3, "judge"), (6, "judge")]
    row = json.loads(file.read_text().splitlines()[2])
    assert row == {
        "sample": 6,
        "component": "judge",
        "reason": "silence\nand more",
        "prompt": "prompt 6",
        "response": "response 6",
        "answer": "6",
    }
    check_unscored(batch({}), 0.24, tmp_path, STEP)
    assert not file.exists()  # the next attempt went well


def test_one_bad_rank_is_no_bad_step(tmp_path: Path) -> None:
    """Both unscored samples fall to one of four ranks, which has no other; of the step they are a quarter."""
    whole = batch({1: {"math": "x"}, 5: {"math": "x"}})
    ranks = DP.spread(whole, Mesh(data=4))
    assert [int(torch.isnan(rank.scores).sum()) for rank in ranks] == [0, 2, 0, 0]
    check_unscored(DP.collect(ranks), 0.25, tmp_path, STEP)
    with pytest.raises(TransientError, match="2 of 8"):
        check_unscored(DP.collect(ranks), 0.2, tmp_path, STEP)


def test_they_are_committed_with_the_experience(tmp_path: Path) -> None:
    save_experience(batch(TWO), tmp_path)
    assert listed(tmp_path / "unscored.jsonl") == [(3, "math"), (3, "judge"), (6, "judge")]
    assert load_experience(tmp_path).column("unscored") == batch(TWO).column("unscored")


def test_an_experience_with_all_scores_has_no_such_file(tmp_path: Path) -> None:
    save_experience(batch({}), tmp_path)
    assert not (tmp_path / "unscored.jsonl").exists()


def test_metrics_by_component_count_what_each_could_score() -> None:
    metrics = describe(batch(TWO)).values()
    assert metrics["reward/unscored_share"] == 0.25
    assert metrics["reward/math_unscored_share"] == 0.125 and metrics["reward/judge_unscored_share"] == 0.25
    assert metrics["reward/math_mean"] == metrics["reward/judge_mean"] == 0.5


def test_a_component_without_any_score_has_no_mean() -> None:
    metrics = describe(batch({row: {"judge": "silence"} for row in range(8)})).values()
    assert metrics["reward/judge_mean"] != metrics["reward/judge_mean"]
    assert metrics["reward/judge_unscored_share"] == 1.0 and metrics["reward/math_mean"] == 0.5
