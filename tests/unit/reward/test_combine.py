"""Reward: weights, missing scores, wrong scores, and the places it is called from."""

import logging
import math
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from multiprocessing.queues import SimpleQueue
from typing import Any

import pytest

from engine.config import ExactMatchReward, MathReward, NumberReward, PythonReward, RegexReward, RewardConfig
from engine.errors import ConfigError, ShapeError, TransientError
from engine.reward import combine
from engine.reward.combine import Reward
from engine.reward.rules import RuleScorer
from engine.reward.scorer import Sample, Score

FUNCTIONS = "tests.unit.reward.functions"


@pytest.fixture(scope="module")
def returns_extra() -> Iterator[Reward]:
    """Scores each sample with whatever its `extra` says."""
    with Reward((PythonReward(function=f"{FUNCTIONS}:returns_extra"),), max_unscored_share=1.0) as reward:
        yield reward


def returning(*values: Any) -> list[Sample]:
    return [Sample("p", "r", extra={"returns": value}, index=10 + place) for place, value in enumerate(values)]


def same(found: list[float], expected: list[float]) -> bool:
    return len(found) == len(expected) and all(
        one == other or (math.isnan(one) and math.isnan(other)) for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize(
    "values",
    [
        (1.0, 0.0, None, 1.0),
        (1.0, 0.0, math.nan, 1.0),
        (1.0, 0.0, math.inf, 1.0),
        (1.0, 0.0, -math.inf, 1.0),
    ],
)
def test_a_missing_score_is_nan_and_touches_no_sibling(returns_extra: Reward, values: tuple[Any, ...]) -> None:
    scored = returns_extra.score(returning(*values))
    assert same(scored.scores, [1.0, 0.0, math.nan, 1.0])
    assert same(scored.components["python"], [1.0, 0.0, math.nan, 1.0])
    assert [(failure.index, failure.component) for failure in scored.failures] == [(12, "python")]


def test_a_group_without_any_score_is_all_nan(returns_extra: Reward) -> None:
    scored = returns_extra.score(returning(None, None, None, None))
    assert same(scored.scores, [math.nan] * 4)
    assert len(scored.failures) == 4


def test_booleans_and_integers_are_scores(returns_extra: Reward) -> None:
    assert returns_extra.score(returning(True, False, 1, -2)).scores == [1.0, 0.0, 1.0, -2.0]


@pytest.mark.parametrize(
    ("value", "kind"), [("1.0", "str"), ({"score": 1.0}, "dict"), ([1.0, 0.0, 1.0], "list"), ((1.0,), "tuple")]
)
def test_what_is_no_score_is_rejected_with_function_and_type(returns_extra: Reward, value: Any, kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        returns_extra.score(returning(1.0, 1.0, value, 1.0))
    message = str(caught.value)
    assert f"{FUNCTIONS}:returns_extra" in message
    assert f"returned {kind}" in message
    assert "sample 12" in message
    assert caught.value.problems[0].key == "reward[0].function"


def test_numpy_numbers_are_scores_and_arrays_are_rejected() -> None:
    with Reward((PythonReward(function=f"{FUNCTIONS}:returns_numpy"),), max_unscored_share=0.0) as reward:
        assert reward.score(returning("float32", "int64")).scores == [0.5, 1.0]
        with pytest.raises(ConfigError, match="returned ndarray"):
            reward.score(returning("array", "float32"))


@pytest.mark.parametrize("count", [3, 5, 0])
def test_a_wrong_number_of_scores_is_refused(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """A scorer of another author, put in the place of ours."""

    class Miscounts(RuleScorer):
        def score(self, samples: list[Sample]) -> list[Score]:
            return [1.0] * count

    monkeypatch.setattr(combine, "build_scorer", lambda config: Miscounts(lambda sample: 1.0))
    reward = Reward((ExactMatchReward(),), max_unscored_share=1.0)
    with pytest.raises(ShapeError, match=f"asked for 4 scores and returned {count}"):
        reward.score([Sample("p", "r", "a")] * 4)


def test_one_exception_costs_one_score(caplog: pytest.LogCaptureFixture) -> None:
    """Seven scores stay; the count and the traceback are logged; the failure names the sample."""
    samples = [Sample("p", "r", extra={"row": row}, index=row) for row in range(8)]
    config = PythonReward(function=f"{FUNCTIONS}:raises_on_three")
    with Reward((config,), max_unscored_share=0.2) as reward, caplog.at_level(logging.WARNING):
        scored = reward.score(samples)
    assert same(scored.scores, [1.0, 1.0, 1.0, math.nan, 1.0, 1.0, 1.0, 1.0])
    assert [(failure.index, failure.component) for failure in scored.failures] == [(3, "python")]
    assert "ZeroDivisionError: row three" in scored.failures[0].reason
    assert "1 of 8 samples have no score" in caplog.text
    assert "ZeroDivisionError: row three" in caplog.text


def test_too_many_exceptions_fail_the_step() -> None:
    samples = [Sample("p", "r", index=row) for row in range(8)]
    config = PythonReward(function=f"{FUNCTIONS}:raises_always")
    with Reward((config,), max_unscored_share=0.1) as reward, pytest.raises(TransientError) as caught:
        reward.score(samples)
    message = str(caught.value)
    assert "8 of 8 samples" in message
    assert "max_unscored_share" in message
    assert "ZeroDivisionError: every row" in message


@pytest.mark.parametrize(("share", "fails"), [(0.24, True), (0.25, False)])
def test_the_share_itself_is_still_allowed(share: float, fails: bool) -> None:
    reward = Reward((NumberReward(),), max_unscored_share=share)
    samples = [Sample("p", "1", answer, index=row) for row, answer in enumerate(["1", "1", "none", "1"])]
    if fails:
        with pytest.raises(TransientError, match="1 of 4"):
            reward.score(samples)
    else:
        assert same(reward.score(samples).scores, [1.0, 1.0, math.nan, 1.0])


def test_components_are_weighted_and_a_gap_in_one_is_a_gap_in_the_sum() -> None:
    rewards: tuple[RewardConfig, ...] = (
        NumberReward(weight=2.0),
        RegexReward(pattern="so", weight=0.5),
        RegexReward(pattern="!", weight=-1.0),
    )
    samples = [Sample("p", "so 1", "1"), Sample("p", "1!", "1"), Sample("p", "so", "2"), Sample("p", "so", "none")]
    scored = Reward(rewards, max_unscored_share=0.5).score(samples)
    assert same(scored.scores, [2.5, 1.0, 0.5, math.nan])
    assert set(scored.components) == {"number", "regex", "regex_2"}
    assert scored.components["regex"] == [1.0, 0.0, 1.0, 1.0]
    assert scored.components["regex_2"] == [0.0, 1.0, 0.0, 0.0]


def test_no_samples_no_scores() -> None:
    scored = Reward((ExactMatchReward(),), max_unscored_share=0.0).score([])
    assert (scored.scores, scored.components, scored.failures) == ([], {"exact_match": []}, [])


MATHS = (MathReward(), PythonReward(function=f"{FUNCTIONS}:uses_alarm", weight=0.0))
THIRDS = [Sample("p", r"\frac{1}{3}", "1/3"), Sample("p", r"\frac{1}{4}", "1/3")]


def score_thirds() -> list[float]:
    """By math-verify and by a function that sets an alarm; both would fail outside a main thread."""
    with Reward(MATHS, max_unscored_share=0.0) as reward:
        return reward.score(THIRDS).scores


def _put_in_process(queue: "SimpleQueue[list[float]]") -> None:
    queue.put(score_thirds())


def _in_thread() -> list[float]:
    found: list[list[float]] = []
    thread = threading.Thread(target=lambda: found.append(score_thirds()))
    thread.start()
    thread.join()
    return found[0]


def _in_process() -> list[float]:
    context = multiprocessing.get_context("spawn")
    queue: SimpleQueue[list[float]] = context.SimpleQueue()
    process = context.Process(target=_put_in_process, args=(queue,))
    process.start()
    found = queue.get()
    process.join()
    return found


@pytest.mark.parametrize("caller", [_in_thread, _in_process])
def test_maths_are_scored_in_every_calling_context(caller: Callable[[], list[float]]) -> None:
    assert caller() == [1.0, 0.0]
