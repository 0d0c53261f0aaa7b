"""Reward: weights, missing scores, wrong scores, and the places it is called from."""

import math
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from multiprocessing.queues import SimpleQueue
from typing import Any

import pytest

from engine.config import ExactMatchReward, MathReward, NumberReward, PythonReward, RegexReward, RewardConfig
from engine.errors import ConfigError, ShapeError
from engine.reward import combine
from engine.reward.combine import Reward
from engine.reward.rules import RuleScorer
from engine.reward.scorer import Sample, Score

FUNCTIONS = "tests.unit.reward.functions"


@pytest.fixture(scope="module")
def returns_extra() -> Iterator[Reward]:
    """Scores each sample with whatever its `extra` says."""
    with Reward((PythonReward(function=f"{FUNCTIONS}:returns_extra"),)) as reward:
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


@pytest.mark.parametrize(("value", "weight"), [(1e39, 1.0), (-1e39, 1.0), (1e20, 1e20), (1e300, 1.0)])
def test_a_sum_that_float32_cannot_hold_is_missing_with_a_reason(value: float, weight: float) -> None:
    """As an infinite score it would be committed, and no iteration could ever learn from the experience."""
    with Reward((PythonReward(function=f"{FUNCTIONS}:returns_extra", weight=weight),)) as reward:
        scored = reward.score(returning(0.5, value))
    assert same(scored.scores, [0.5 * weight, math.nan])
    assert [(one.index, one.component) for one in scored.failures] == [(11, "sum")]


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
    with Reward((PythonReward(function=f"{FUNCTIONS}:returns_numpy"),)) as reward:
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
    reward = Reward((ExactMatchReward(),))
    with pytest.raises(ShapeError, match=f"asked for 4 scores and returned {count}"):
        reward.score([Sample("p", "r", "a")] * 4)


def test_one_exception_costs_one_score() -> None:
    """Seven scores stay; the failure names the sample and holds the traceback."""
    samples = [Sample("p", "r", extra={"row": row}, index=row) for row in range(8)]
    config = PythonReward(function=f"{FUNCTIONS}:raises_on_three")
    with Reward((config,)) as reward:
        scored = reward.score(samples)
    assert same(scored.scores, [1.0, 1.0, 1.0, math.nan, 1.0, 1.0, 1.0, 1.0])
    assert [(failure.index, failure.component) for failure in scored.failures] == [(3, "python")]
    assert "ZeroDivisionError: row three" in scored.failures[0].reason


def test_exceptions_alone_do_not_stop_the_scoring() -> None:
    """Whether too many samples have no score is decided over all ranks (engine/unscored.py)."""
    samples = [Sample("p", "r", index=row) for row in range(8)]
    with Reward((PythonReward(function=f"{FUNCTIONS}:raises_always"),)) as reward:
        scored = reward.score(samples)
    assert same(scored.scores, [math.nan] * 8)
    assert all("ZeroDivisionError: every row" in failure.reason for failure in scored.failures)


def test_components_wait_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each component waits for the others in its call: one after the other, they would never end."""
    together = threading.Barrier(3, timeout=60)

    def build(config: RewardConfig) -> RuleScorer:
        def rule(sample: Sample) -> Score:
            together.wait()
            return config.weight

        return RuleScorer(rule)

    monkeypatch.setattr(combine, "build_scorer", build)
    rewards = tuple(NumberReward(weight=weight) for weight in (1.0, 2.0, 3.0))
    with Reward(rewards) as reward:
        scored = reward.score([Sample("p", "r")])
    assert list(scored.components.values()) == [[1.0], [2.0], [3.0]] and scored.scores == [14.0]


def test_components_are_weighted_and_a_gap_in_one_is_a_gap_in_the_sum() -> None:
    rewards: tuple[RewardConfig, ...] = (
        NumberReward(weight=2.0),
        RegexReward(pattern="so", weight=0.5),
        RegexReward(pattern="!", weight=-1.0),
    )
    samples = [Sample("p", "so 1", "1"), Sample("p", "1!", "1"), Sample("p", "so", "2"), Sample("p", "so", "none")]
    with Reward(rewards) as reward:
        scored = reward.score(samples)
    assert same(scored.scores, [2.5, 1.0, 0.5, math.nan])
    assert set(scored.components) == {"number", "regex", "regex_2"}
    assert scored.components["regex"] == [1.0, 0.0, 1.0, 1.0]
    assert scored.components["regex_2"] == [0.0, 1.0, 0.0, 0.0]


def test_a_gap_in_what_is_only_measured_is_none_in_the_sum_but_told() -> None:
    with Reward((RegexReward(pattern="so"), NumberReward(weight=0.0))) as reward:
        scored = reward.score([Sample("p", "so", "none"), Sample("p", "1", "1")])
    assert scored.scores == [1.0, 0.0] and same(scored.components["number"], [math.nan, 1.0])
    assert [failure.component for failure in scored.failures] == ["number"]


def test_a_pattern_that_backtracks_for_ever_costs_one_sample_not_the_run() -> None:
    samples = [Sample("p", "a" * 40 + "!", index=0), Sample("p", "aaa", index=1)]
    with Reward((RegexReward(pattern="^(a+)+$", timeout_s=1.0),)) as reward:
        scored = reward.score(samples)
    assert same(scored.scores, [math.nan, 1.0])
    assert "longer than 1.0 s" in scored.failures[0].reason


def test_no_samples_no_scores() -> None:
    scored = Reward((ExactMatchReward(),)).score([])
    assert (scored.scores, scored.components, scored.failures) == ([], {"exact_match": []}, [])


MATHS = (MathReward(), PythonReward(function=f"{FUNCTIONS}:uses_alarm", weight=0.0))
THIRDS = [Sample("p", r"\frac{1}{3}", "1/3"), Sample("p", r"\frac{1}{4}", "1/3")]


def score_thirds() -> list[float]:
    """By math-verify and by a function that sets an alarm; both would fail outside a main thread."""
    with Reward(MATHS) as reward:
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
