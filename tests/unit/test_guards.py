"""Guards: what is outside its bounds is said, slows the run down or ends it; what was not measured is outside."""

import logging
import math
from typing import Any

import pytest

from engine.checks import check_config
from engine.config import GuardConfig
from engine.errors import DivergedError
from engine.guards import WATCHED, equal_scores, judge
from engine.metrics import Metrics
from tests.helpers.configs import config


def guard(**options: Any) -> GuardConfig:
    return GuardConfig.model_validate({"watch": "length", **options})


def measured(value: float, watch: str = "length") -> Metrics:
    return Metrics().with_value(WATCHED[watch], value)


@pytest.mark.parametrize("value", [2.0, 5.0, 8.0])
def test_inside_and_on_the_bounds_nothing_happens(value: float, caplog: pytest.LogCaptureFixture) -> None:
    assert judge([guard(below=2.0, above=8.0, action="stop")], measured(value), {}) == {"guard_0": 0.0}
    assert not caplog.records


@pytest.mark.parametrize("value", [1.9, 8.1, math.nan])
def test_outside_the_run_stops_with_what_was_found_and_where(value: float) -> None:
    with pytest.raises(DivergedError, match=r"guards\[0\]: length \(rollout/response_tokens_mean\) is") as stopped:
        judge([guard(below=2.0, above=8.0, action="stop")], measured(value), {})
    assert "above 8 or below 2" in str(stopped.value) and stopped.value.exit_code == 4


def test_patience_counts_iterations_in_a_row_across_a_restart() -> None:
    guards = [guard(above=8.0, action="stop", patience=3)]
    state = judge(guards, measured(9.0), {})
    state = judge(guards, measured(9.0), state)
    assert judge(guards, measured(7.0), state)["guard_0"] == 0.0, "one good iteration starts the count again"
    with pytest.raises(DivergedError, match="3 time"):
        judge(guards, measured(9.0), state)


def test_a_warning_says_so_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        judge([guard(above=8.0)], measured(9.0), {"kl_coef": 0.2})
    assert "length" in caplog.text and "must not be above 8" in caplog.text


def test_the_rate_is_halved_each_time_and_other_controllers_stay() -> None:
    guards = [guard(above=8.0, action="lower_rate", patience=2)]
    state: dict[str, float] = {"kl_coef": 0.2}
    scales = []
    for _ in range(4):
        state = judge(guards, measured(9.0), state)
        scales.append(state.get("rate_scale", 1.0))
    assert scales == [1.0, 0.5, 0.5, 0.25] and state["kl_coef"] == 0.2


def test_what_an_iteration_has_not_is_not_judged() -> None:
    assert judge([GuardConfig(watch="clip_share", above=0.1, action="stop")], measured(9.0), {}) == {}


REFUSED = {
    "no bound": ({"watch": "length"}, "guards[0].above"),
    "bounds the wrong way round": ({"watch": "length", "below": 9, "above": 3}, "guards[0].below"),
    "distance to a reference that is not there": ({"watch": "kl", "above": 1}, "guards[0].watch"),
    "more patience than iterations": ({"watch": "length", "above": 1, "patience": 4}, "guards[0].patience"),
}


@pytest.mark.parametrize(("options", "key"), REFUSED.values(), ids=REFUSED)
def test_a_guard_that_cannot_work_is_refused(options: dict[str, Any], key: str) -> None:
    assert [problem.key for problem in check_config(config(guards=[options]))] == [key]


def test_clip_share_needs_something_that_clips() -> None:
    options = {"guards": [{"watch": "clip_share", "above": 0.5}], "train": {"mini_batches": 2}}
    assert check_config(config(**options)) == []
    assert [one.key for one in check_config(config(algorithm={"name": "gpg"}, **options))] == ["guards[0].watch"]


@pytest.mark.parametrize("watch", ["step_kl", "clip_share"])
def test_how_far_a_step_moved_the_policy_is_not_seen_where_there_is_only_one(watch: str) -> None:
    """Both are measured before a step: with one step per iteration they are 0, whatever happens."""
    guards = [{"watch": watch, "above": 0.1, "action": "stop"}]
    one_step = check_config(config(guards=guards, train={"mini_batches": 1}))
    assert [problem.key for problem in one_step] == ["guards[0].watch"]
    assert check_config(config(guards=guards, train={"mini_batches": 1, "epochs": 2})) == []
    assert check_config(config(guards=guards, train={"mini_batches": 2})) == []


@pytest.mark.parametrize(
    ("mean", "spread", "found"),
    [(0.0, 0.0, 0.0), (0.3, 3e-9, 0.3), (0.3, 1e-3, None), (None, None, None), (0.3, math.nan, None)],
)
def test_scores_are_equal_if_they_are_but_for_rounding(
    mean: float | None, spread: float | None, found: float | None
) -> None:
    assert equal_scores({"reward/score_mean": mean, "reward/score_std": spread}) == found
    assert equal_scores({}) is None
