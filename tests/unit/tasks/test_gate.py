"""The gate promotes only what was measured and is good enough; everything else is a rejection that says why."""

import math
from typing import Any

import pytest

from engine.config import GateConfig
from tasks.gate import judge

FLOOR = GateConfig(min_score=0.5)
START = {"held_out": {"score_mean": 0.3, "rows": 10}}


def report(score: Any, rows: Any = 10) -> dict[str, Any]:
    return {"held_out": {"score_mean": score, "rows": rows}}


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        (report(math.nan), "nan"),
        (report(math.inf), "inf"),
        ({}, "no suite held_out"),
        ({"held_out": {"rows": 10}}, "None"),
        (report(None), "None"),
        (report("0.9"), "'0.9'"),
        (report(True), "True"),
        (report(0.9, rows=0), "0 rows"),
        (report(0.9, rows=None), "None rows"),
        (None, "did not finish"),
    ],
)
def test_a_score_that_is_missing_or_no_number_rejects(candidate: Any, reason: str):
    verdict = judge(candidate, START, FLOOR)
    assert verdict.verdict == "reject"
    assert reason in verdict.reasons[0] and "final policy" in verdict.reasons[0]


@pytest.mark.parametrize("baseline", [None, {}, report(math.nan), report(None), report(0.3, rows=0)])
def test_a_start_checkpoint_without_a_score_rejects(baseline: Any):
    verdict = judge(report(0.9), baseline, FLOOR)
    assert verdict.verdict == "reject" and "start checkpoint" in verdict.reasons[0]


@pytest.mark.parametrize(
    ("score", "expected"), [(0.6, "promote"), (0.5, "promote"), (0.4999, "reject"), (0.4, "reject")]
)
def test_the_floor_decides_where_there_is_no_champion(score: float, expected: str):
    assert judge(report(score), START, FLOOR).verdict == expected


@pytest.mark.parametrize(
    ("score", "gain", "expected"),
    [
        (0.7, 0.4, "promote"),
        (0.69, 0.4, "reject"),
        (0.3, 0.0, "promote"),
        (0.29, 0.0, "reject"),
        (0.25, -0.1, "promote"),
    ],
)
def test_the_gain_over_the_start_checkpoint_decides(score: float, gain: float, expected: str):
    """0.7 - 0.3 is a little less than 0.4 in binary, and still counts as 0.4."""
    assert judge(report(score), START, GateConfig(min_gain=gain)).verdict == expected


def test_every_failed_check_is_a_reason():
    verdict = judge(report(0.2), START, GateConfig(min_score=0.5, min_gain=0.1))
    assert len(verdict.reasons) == 2
    assert "-0.1000" in verdict.reasons[0] and "+0.1" in verdict.reasons[0]
    assert "0.2000" in verdict.reasons[1] and "0.5" in verdict.reasons[1]


def test_a_promotion_says_what_was_compared():
    verdict = judge(report(0.6), START, FLOOR)
    assert verdict.verdict == "promote" and "0.3000 -> 0.6000" in verdict.reasons[0]


def test_another_suite_does_not_stand_in():
    assert judge({"other": {"score_mean": 1.0, "rows": 10}}, START, FLOOR).verdict == "reject"


def test_one_component_may_decide_whatever_the_weighted_sum_says():
    start = {"held_out": {"score_mean": 5.0, "rows": 10, "components": {"model": 5.0, "exact_match": 0.5}}}
    later = {"held_out": {"score_mean": 9.0, "rows": 10, "components": {"model": 9.0, "exact_match": 0.4}}}
    assert judge(later, start, GateConfig()).verdict == "promote"
    verdict = judge(later, start, GateConfig(component="exact_match"))
    assert verdict.verdict == "reject" and verdict.reasons[0].startswith("held_out, exact_match: gain -0.1000")
    assert judge(later, start, GateConfig(component="number")).reasons == (
        "held_out: number of the final policy is None, which is no number",
    )
