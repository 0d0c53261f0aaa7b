"""The canary: a reward that cannot tell right from wrong stops the run before it starts."""

import pytest

from engine.config import (
    ChoiceReward,
    ExactMatchReward,
    FormatReward,
    HttpReward,
    JsonSchemaReward,
    JudgeReward,
    LengthPenaltyReward,
    MathReward,
    NumberReward,
    PythonReward,
    ReasoningGymReward,
    RegexReward,
    RepetitionPenaltyReward,
    RewardConfig,
)
from engine.errors import ConfigError, TransientError
from engine.reward import combine
from engine.reward.combine import Reward
from engine.reward.rules import RuleScorer
from engine.reward.scorer import Sample, Scorer
from tests.unit.reward.service import Answer, honest, serving

FUNCTIONS = "tests.unit.reward.functions"


def canary(config: RewardConfig, *samples: Sample) -> None:
    with Reward((config,)) as reward:
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
        (ChoiceReward(), "B"),
        (ChoiceReward(), "(A) Paris"),
        (FormatReward(), None),
        (FormatReward(tags=("answer",)), None),
        (JsonSchemaReward(definition={"type": "object"}), None),
        (JsonSchemaReward(definition={"type": "object", "examples": [{"a": 1}]}), None),
        (LengthPenaltyReward(max_tokens=10, buffer_tokens=10), None),
        (RepetitionPenaltyReward(), None),
        (RepetitionPenaltyReward(ngram=1, unit="characters"), None),
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
        (ChoiceReward(), "2", "none of the choices A, B, C, D"),
        (ChoiceReward(), None, "label_key"),
        (JsonSchemaReward(definition={"type": "array", "examples": [{"a": 1}]}), None, "got 0; wanted 1"),
        (JsonSchemaReward(definition={"$ref": "other.json"}), None, "Unresolvable"),
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


@pytest.mark.parametrize(
    "config",
    [FormatReward(), LengthPenaltyReward(max_tokens=9, buffer_tokens=3), RepetitionPenaltyReward()],
)
def test_a_rule_that_always_says_the_same_is_caught(monkeypatch: pytest.MonkeyPatch, config: RewardConfig) -> None:
    monkeypatch.setattr(combine, "build_scorer", lambda config: RuleScorer(lambda sample: 0.0))
    with pytest.raises(ConfigError, match="got 0; wanted"):
        canary(config)


class TestService:
    def test_that_tells_right_from_wrong_passes_with_one_call(self) -> None:
        with serving(honest) as service:
            canary(HttpReward(url=service.url), Sample("p", "", "7"), Sample("p", "", "8"), Sample("p", "", None))
        assert [one["response"] for one in service.asked[0]["samples"]] == [
            "7",
            "8",
            "I do not know.",
            "I do not know.",
        ]
        assert len(service.asked) == 1

    def test_that_says_the_same_of_all_is_refused(self) -> None:
        with serving(lambda number, body: Answer(body={"scores": [0.5] * len(body["samples"])})) as service:
            with pytest.raises(ConfigError, match=r"more for the right one.*needs_answer: false") as caught:
                canary(HttpReward(url=service.url), Sample("p", "", "7"))
            assert caught.value.problems[0].key == "reward[0].url"
            canary(HttpReward(url=service.url, needs_answer=False), Sample("p", "", "7"))

    @pytest.mark.parametrize("needs_answer", [True, False])
    def test_that_is_down_or_refuses_is_named(self, needs_answer: bool) -> None:
        """A silent one may be back at the next attempt; one that refuses needs another configuration."""
        for status, kind, found in ((503, TransientError, "failed 1 times"), (404, ConfigError, "answered 404")):
            answer = Answer(status, b"")
            with serving(lambda number, body, answer=answer: answer) as service:
                config = HttpReward(url=service.url, needs_answer=needs_answer, retries=0)
                with pytest.raises(kind, match=found):
                    canary(config, Sample("p", "", "7"))

    @pytest.mark.parametrize(("reference", "passes"), [("", True), (" Reference: {answer}.", False)])
    def test_a_judge_is_contrasted_only_where_it_sees_the_answer(self, reference: str, passes: bool) -> None:
        reply = Answer(body={"choices": [{"message": {"content": "Score: 5"}}]})
        with serving(lambda number, body: reply) as service:
            judge = JudgeReward(base_url=service.url, model="m", template=f"Judge {{response}}.{reference}")
            if passes:
                canary(judge, Sample("p", "", "7"))
                return
            with pytest.raises(ConfigError, match=r"got 0\.5, a wrong response 0\.5"):
                canary(judge, Sample("p", "", "7"))


@pytest.mark.parametrize("constant", [0.0, 1.0])
def test_a_verifier_that_always_says_the_same_is_caught(monkeypatch: pytest.MonkeyPatch, constant: float) -> None:
    def build(config: RewardConfig) -> Scorer:
        return RuleScorer(lambda sample: constant)

    monkeypatch.setattr(combine, "build_scorer", build)
    with pytest.raises(ConfigError, match="wanted 1 and 0"):
        canary(MathReward(), Sample("p", "", "1/3"))


def test_all_broken_components_are_named_at_once() -> None:
    rewards = (NumberReward(), RegexReward(pattern="x"), ExactMatchReward())
    with Reward(rewards) as reward, pytest.raises(ConfigError) as caught:
        reward.canary([Sample("p", "", None)])
    assert [problem.key for problem in caught.value.problems] == ["reward[0].kind", "reward[2].kind"]
