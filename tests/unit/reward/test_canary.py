"""The canary: a reward that cannot tell right from wrong stops the run before it starts."""

import pytest

from engine.config import (
    ExactMatchReward,
    MathReward,
    NumberReward,
    PythonReward,
    ReasoningGymReward,
    RegexReward,
    RewardConfig,
)
from engine.errors import ConfigError
from engine.reward import combine
from engine.reward.combine import Reward
from engine.reward.rules import RuleScorer
from engine.reward.scorer import Sample, Scorer

FUNCTIONS = "tests.unit.reward.functions"


def canary(config: RewardConfig, *samples: Sample) -> None:
    with Reward((config,), max_unscored_share=0.0) as reward:
        reward.canary(list(samples))


@pytest.mark.parametrize(
    ("config", "answer"),
    [
        (ExactMatchReward(), "Paris"),
        (ExactMatchReward(ignore_case=True), "Paris"),
        (NumberReward(), "42"),
        (NumberReward(tolerance=100.0), "42"),
        (NumberReward(), "#### 1,234.5"),
        (MathReward(), "x+1"),
        (ReasoningGymReward(dataset="chain_sum"), "19"),
        (PythonReward(function=f"{FUNCTIONS}:length"), "42"),
        (PythonReward(function=f"{FUNCTIONS}:length"), None),
        (RegexReward(pattern="x"), None),
    ],
)
def test_a_working_reward_passes(config: RewardConfig, answer: str | None) -> None:
    canary(config, Sample("p", "", answer))


@pytest.mark.parametrize(
    ("config", "answer", "found"),
    [
        (NumberReward(), "forty-two", "contains no number"),
        (NumberReward(), None, "label_key"),
        (ExactMatchReward(), None, "label_key"),
        (PythonReward(function=f"{FUNCTIONS}:absent"), "42", "has no attribute 'absent'"),
        (PythonReward(function="tests.unit.reward.absent:score"), "42", "PYTHONPATH"),
        (PythonReward(function=f"{FUNCTIONS}:raises_always"), "42", "ZeroDivisionError"),
    ],
)
def test_a_broken_reward_is_named(config: RewardConfig, answer: str | None, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        canary(config, Sample("p", "", answer))
    assert found in str(caught.value)
    assert caught.value.problems[0].key.startswith("reward[0].")


def test_a_function_that_returns_text_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="returned str"):
        canary(PythonReward(function=f"{FUNCTIONS}:returns_extra"), Sample("p", "", extra={"returns": "1.0"}))


def test_a_function_may_decline() -> None:
    canary(PythonReward(function=f"{FUNCTIONS}:returns_extra"), Sample("p", "", extra={"returns": None}))


def test_one_odd_answer_does_not_stop_the_run() -> None:
    canary(NumberReward(), Sample("p", "", "forty-two"), Sample("p", "", "43"))


@pytest.mark.parametrize("constant", [0.0, 1.0])
def test_a_verifier_that_always_says_the_same_is_caught(monkeypatch: pytest.MonkeyPatch, constant: float) -> None:
    def build(config: RewardConfig) -> Scorer:
        return RuleScorer(lambda sample: constant)

    monkeypatch.setattr(combine, "build_scorer", build)
    with pytest.raises(ConfigError, match="wanted 1 and 0"):
        canary(MathReward(), Sample("p", "", "1/3"))


def test_all_broken_components_are_named_at_once() -> None:
    rewards = (NumberReward(), RegexReward(pattern="x"), ExactMatchReward())
    with pytest.raises(ConfigError) as caught:
        Reward(rewards, max_unscored_share=0.0).canary([Sample("p", "", None)])
    assert [problem.key for problem in caught.value.problems] == ["reward[0].kind", "reward[2].kind"]
