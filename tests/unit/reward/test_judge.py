"""A language model as judge: a real HTTP service on this machine plays the OpenAI-compatible endpoint."""

from collections.abc import Callable
from typing import Any

import pytest

from engine.config import JudgeReward
from engine.errors import ConfigError
from engine.reward.build import build_scorer
from engine.reward.combine import Reward
from engine.reward.judge import filled
from engine.reward.scorer import Sample, Score, Unscored
from tests.unit.reward.service import Answer, Service, serving

TEMPLATE = "Question: {prompt}\nAnswer: {response}\nEnd with Score: 0 to 10."
ROWS = [Sample("p", str(row), index=row) for row in range(4)]


def config(service: Service, **changed: Any) -> JudgeReward:
    options = {"model": "referee", "template": TEMPLATE, "backoff_s": 0.01, "retries": 2, "timeout_s": 20.0, **changed}
    return JudgeReward(base_url=service.url.removesuffix("/score") + "/v1/", **options)


def score(service: Service, samples: list[Sample], **changed: Any) -> list[Score]:
    scorer = build_scorer(config(service, **changed))
    try:
        return scorer.score(samples)
    finally:
        scorer.close()


def saying(text: str | None) -> Answer:
    return Answer(body={"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]})


def said(*texts: str | None) -> Callable[[int, Any], Answer]:
    """The text at the place that the response to be judged names."""

    def answer(number: int, body: Any) -> Answer:
        return saying(texts[int(body["messages"][0]["content"].split("Answer: ")[1].split("\n")[0])])

    return answer


def test_the_request_is_a_chat_completion_at_temperature_zero() -> None:
    with serving(lambda number, body: saying("Score: 10")) as service:
        assert score(service, [Sample("1+1=", "2")], max_tokens=99) == [1.0]
    assert service.asked == [
        {
            "model": "referee",
            "messages": [{"role": "user", "content": "Question: 1+1=\nAnswer: 2\nEnd with Score: 0 to 10."}],
            "temperature": 0,
            "max_tokens": 99,
        }
    ]


def test_numbers_between_low_and_high_become_scores_in_order() -> None:
    with serving(said("Score: 10", "score = 0", "**Score**: 2.5", "Score: 3? No. Score: 5/10")) as service:
        assert score(service, ROWS) == [1.0, 0.0, 0.25, 0.5]


def test_other_bounds_and_another_pattern() -> None:
    with serving(said("[[1]]", "[[5]]", "[[3]]", "[[2]]")) as service:
        assert score(service, ROWS, pattern=r"\[\[(\d)\]\]", low=1, high=5) == [0.0, 1.0, 0.5, 0.25]


def test_a_reply_without_a_readable_score_costs_its_own_sample_alone() -> None:
    """Out of bounds is not clipped: what was not said is not invented."""
    with serving(said("I like it.", "Score: 11", None, "Score: 7")) as service:
        scores = score(service, ROWS)
    reasons = [one.reason for one in scores if isinstance(one, Unscored)]
    assert scores[3] == 0.7 and len(reasons) == 3
    assert "holds no score; it ends 'I like it.'" in reasons[0]
    assert "11, which is not between 0 and 10" in reasons[1]
    assert "without a text" in reasons[2]


def test_a_pattern_that_backtracks_for_ever_costs_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.reward.build._READING_S", 1.0)
    with serving(said("a" * 40 + "b", "aaa5", "aa5", "a5")) as service:
        scores = score(service, ROWS, pattern=r"^(?:a+)+(\d)$")
    assert isinstance(scores[0], Unscored) and "longer than 1.0 s" in scores[0].reason
    assert scores[1:] == [0.5, 0.5, 0.5]


def test_a_group_that_is_no_number_is_unscored() -> None:
    with serving(lambda number, body: saying("Score: good")) as service:
        assert isinstance(score(service, ROWS[:1], pattern=r"Score: (\w+)")[0], Unscored)


def test_an_overloaded_judge_is_asked_again() -> None:
    with serving(lambda number, body: Answer(503, b"") if number < 2 else saying("Score: 5")) as service:
        assert score(service, ROWS[:1]) == [0.5]
    assert len(service.asked) == 3


def test_a_sample_that_the_judge_cannot_take_is_unscored_and_the_others_are_not() -> None:
    def answer(number: int, body: Any) -> Answer:
        long = "Answer: 2" in body["messages"][0]["content"]
        return Answer(400, b"context length exceeded") if long else saying("Score: 5")

    with serving(answer) as service:
        scores = score(service, ROWS)
    assert [scores[0], scores[1], scores[3]] == [0.5] * 3
    assert isinstance(scores[2], Unscored) and "context length exceeded" in scores[2].reason


@pytest.mark.parametrize(
    "answer", [Answer(401, b"who?"), Answer(404, b"no model"), Answer(body={"choices": []}), Answer(body=b"hello")]
)
def test_a_judge_that_refuses_or_is_none_is_for_the_user_to_mend(answer: Answer) -> None:
    refused = pytest.raises(ConfigError, match=r"reward\[0\].base_url")
    with serving(lambda number, body: answer) as service, Reward((config(service),)) as reward, refused:
        reward.score(ROWS)


def test_calls_are_under_way_at_once_up_to_the_limit() -> None:
    with serving(lambda number, body: saying("Score: 5")) as service:
        score(service, [Sample("p", str(row)) for row in range(20)], concurrency=2)
    assert len(service.asked) == 20 and service.most_at_once <= 2


def test_texts_are_put_in_once_and_other_braces_stay() -> None:
    sample = Sample("{response} {x}", "{answer}", "$1\\1")
    template = '{prompt}|{response}|{answer}|{"score": 1}|{}|{other}'
    assert filled(template, sample) == '{response} {x}|{answer}|$1\\1|{"score": 1}|{}|{other}'
    assert filled("{answer}.", Sample("p", "r")) == "."
