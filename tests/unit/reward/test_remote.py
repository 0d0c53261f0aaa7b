"""Scores over HTTP, from a real service on this machine that works, fails, stalls and talks nonsense."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from engine.config import HttpReward
from engine.errors import ConfigError, ShapeError
from engine.reward import endpoint
from engine.reward.build import build_scorer
from engine.reward.combine import Reward, Scored
from engine.reward.scorer import Sample, Score, Unscored
from tests.unit.reward.service import Answer, Service, honest, scores_of, serving

TOKEN = "tok-CANARY-123"
ROWS = [Sample("p", "7" if row % 2 else "8", "7", {"row": row}, row) for row in range(4)]


def config(url: str, **changed: Any) -> HttpReward:
    return HttpReward(url=url, **{"backoff_s": 0.01, "retries": 2, "timeout_s": 20.0, **changed})


def score(service: Service, samples: list[Sample] | None = None, **changed: Any) -> list[Score]:
    scorer = build_scorer(config(service.url, **changed))
    try:
        return scorer.score(ROWS if samples is None else samples)
    finally:
        scorer.close()


def combined(service: Service, **changed: Any) -> Scored:
    with Reward((config(service.url, **changed),)) as reward:
        return reward.score(ROWS)


def failing(times: int, answer: Answer) -> Callable[[int, Any], Answer]:
    """So many failures, then honest scores."""
    return lambda number, body: answer if number < times else honest(number, body)


def reasons(scores: list[Score]) -> list[str]:
    assert all(isinstance(one, Unscored) for one in scores)
    return [one.reason for one in scores if isinstance(one, Unscored)]


def test_samples_are_sent_whole_and_scores_come_back_in_order() -> None:
    with serving(honest) as service:
        assert score(service) == [0.0, 1.0, 0.0, 1.0]
    sent = {"prompt": "p", "response": "8", "answer": "7", "extra": {"row": 0}}
    assert len(service.asked) == 1 and service.asked[0]["samples"][0] == sent


def test_a_batch_is_sent_once_it_is_full_while_others_are_still_to_come() -> None:
    """Two samples fill the first call, which is waited for before the third is there; no more come, and it is sent alone."""
    asked = threading.Event()

    def answer(number: int, body: Any) -> Answer:
        asked.set()
        return honest(number, body)

    def arriving() -> Iterator[Sample]:
        yield from ROWS[:2]
        assert asked.wait(60), "the first batch was not sent"
        yield ROWS[2]

    with serving(answer) as service:
        scorer = build_scorer(config(service.url, batch_size=2))
        assert scorer.score(arriving()) == [0.0, 1.0, 0.0]
        scorer.close()
    assert [len(body["samples"]) for body in service.asked] == [2, 1]


def test_batches_are_under_way_at_once_up_to_the_limit_and_keep_their_order() -> None:
    """Three calls wait for each other, so the test ends only if they run at once; a fourth never joins them."""
    together = threading.Barrier(3, timeout=60)

    def answer(number: int, body: Any) -> Answer:
        together.wait()
        return honest(number, body)

    samples = [Sample("p", "7" if row % 3 else "8", "7", index=row) for row in range(12)]
    with serving(answer) as service:
        assert score(service, samples, batch_size=2, concurrency=3) == [float(row % 3 != 0) for row in range(12)]
    assert len(service.asked) == 6 and service.most_at_once == 3


def test_no_samples_ask_nothing() -> None:
    with serving(honest) as service:
        assert score(service, []) == []
    assert service.asked == []


@pytest.mark.parametrize("status", [500, 502, 503, 504, 408, 425, 429])
def test_a_passing_failure_is_repeated_until_there_are_scores(status: int) -> None:
    with serving(failing(2, Answer(status, b"busy"))) as service:
        assert score(service) == [0.0, 1.0, 0.0, 1.0]
    assert len(service.asked) == 3


@pytest.mark.parametrize("text", ["\xb2", "\xb3\xb2", "soon", "-1", ""])
def test_a_pause_that_is_no_number_is_none(text: str) -> None:
    """A superscript is a digit to Python and no number."""
    with serving(failing(1, Answer(503, b"", {"Retry-After": text}))) as service:
        assert score(service) == [0.0, 1.0, 0.0, 1.0]


def test_a_reply_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "LARGEST_REPLY", 2**10)
    with serving(failing(99, Answer(200, b"[" + b"0," * 2**12))) as service:
        assert "longer than 1024 bytes" in reasons(score(service))[0]


def test_an_outage_leaves_samples_unscored_after_a_bounded_number_of_calls() -> None:
    with serving(failing(99, Answer(503, b"down for the night"))) as service:
        scores = score(service)
    assert len(service.asked) == 3
    assert {one.cause for one in scores if isinstance(one, Unscored)} == {"unreachable"}
    assert "failed 3 times" in reasons(scores)[0] and "503 down for the night" in reasons(scores)[0]


def test_a_failed_batch_costs_no_other_batch_its_scores() -> None:
    def answer(number: int, body: Any) -> Answer:
        lost = body["samples"][0]["extra"]["row"] == 2
        return Answer(500, b"") if lost else honest(number, body)

    with serving(answer) as service:
        scores = score(service, batch_size=1)
    assert [scores[0], scores[1], scores[3]] == [0.0, 1.0, 1.0] and isinstance(scores[2], Unscored)


def test_nobody_listening_is_an_outage() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/score"
    scorer = build_scorer(config(url))
    assert "ConnectError" in reasons(scorer.score(ROWS))[0]
    scorer.close()


@pytest.mark.parametrize("drip", [0.0, 0.1])
def test_a_reply_that_takes_too_long_is_given_up(drip: float) -> None:
    """Whole or byte by byte: each byte is in time, the reply is not."""

    def answer(number: int, body: Any) -> Answer:
        if not drip:
            service.done.wait(60)
        return Answer(body={"scores": scores_of(body), "padding": "x" * 1000}, drip=drip)

    started = time.monotonic()
    with serving(answer) as service:
        found = reasons(score(service, timeout_s=0.5, retries=1))
        service.done.set()
    assert "failed 2 times" in found[0] and "ReadTimeout" in found[0]
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("date", [False, True])
def test_retry_after_is_respected(monkeypatch: pytest.MonkeyPatch, date: bool) -> None:
    """Seconds or a date: the pause is what the service asks, and never longer than the bound."""
    pauses = recorded_pauses(monkeypatch)
    asked = format_datetime(datetime.now(UTC) + timedelta(seconds=41), usegmt=True) if date else "40"
    with serving(failing(1, Answer(429, b"", {"Retry-After": asked}))) as service:
        assert score(service) == [0.0, 1.0, 0.0, 1.0]
    assert len(pauses) == 1 and 38 < pauses[0] <= 41


@pytest.mark.parametrize(("asked", "least", "most"), [("86400", 60.0, 60.0), ("soon", 0.25, 0.5), ("-5", 0.25, 0.5)])
def test_what_retry_after_asks_is_bounded(
    monkeypatch: pytest.MonkeyPatch, asked: str, least: float, most: float
) -> None:
    pauses = recorded_pauses(monkeypatch)
    with serving(failing(1, Answer(503, b"", {"Retry-After": asked}))) as service:
        score(service, backoff_s=0.5)
    assert len(pauses) == 1 and least <= pauses[0] <= most


def test_pauses_double_and_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = recorded_pauses(monkeypatch)
    with serving(failing(99, Answer(503, b""))) as service:
        score(service, retries=6, backoff_s=1.0)
    assert len(pauses) == 6  # none after the last attempt
    assert all(0.5 * 2**place <= pause <= 2**place for place, pause in enumerate(pauses))
    assert len({pause / 2**place for place, pause in enumerate(pauses)}) == 6


def recorded_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses are noted, not waited for."""
    pauses: list[float] = []

    class Clock(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            pauses.append(timeout)
            return False

    class Threading:
        Event = Clock

    monkeypatch.setattr(endpoint, "threading", Threading)
    return pauses


def test_closing_ends_a_pause() -> None:
    with serving(failing(99, Answer(503, b"", {"Retry-After": "50"}))) as service:
        scorer = build_scorer(config(service.url))
        found: list[list[Score]] = []
        thread = threading.Thread(target=lambda: found.append(scorer.score(ROWS)))
        started = time.monotonic()
        thread.start()
        while not service.asked:
            time.sleep(0.01)
        scorer.close()
        thread.join(timeout=40)
    assert time.monotonic() - started < 40 and len(reasons(found[0])) == 4


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 307])
def test_a_service_that_refuses_is_for_the_user_to_mend(status: int) -> None:
    with serving(failing(99, Answer(status, b"no such path"))) as service, pytest.raises(ConfigError) as caught:
        combined(service)
    problem = caught.value.problems[0]
    assert (problem.key, problem.value) == ("reward[0].url", service.url)
    assert f"answered {status} no such path" in problem.remedy
    assert len(service.asked) == 1


@pytest.mark.parametrize(
    "body", [b"<html>", b"", b'{"scores": [1', {"score": [1, 1, 1, 1]}, [1, 1, 1, 1], {"scores": 1}]
)
def test_a_reply_of_another_form_is_for_the_user_to_mend(body: Any) -> None:
    with serving(failing(99, Answer(body=body))) as service, pytest.raises(ConfigError, match=r"reward\[0\].url"):
        combined(service)


@pytest.mark.parametrize("count", [0, 3, 5])
def test_a_wrong_number_of_scores_is_refused(count: int) -> None:
    with serving(failing(99, Answer(body={"scores": [1.0] * count}))) as service, pytest.raises(ShapeError) as caught:
        combined(service)
    assert f"{service.url} was sent 4 samples and returned {count} scores" in str(caught.value)


@pytest.mark.parametrize(("value", "kind"), [("1.0", "str"), ({"score": 1}, "dict"), ([1.0], "list")])
def test_what_is_no_score_is_refused_with_its_type(value: Any, kind: str) -> None:
    answer = Answer(body={"scores": [1.0, value, 1.0, 1.0]})
    with serving(failing(99, answer)) as service, pytest.raises(ConfigError, match=f"returned {kind}"):
        combined(service)


def test_null_and_what_is_not_finite_are_unscored() -> None:
    body = b'{"scores": [null, NaN, 1e999, ' + b"9" * 400 + b"]}"
    with serving(failing(99, Answer(body=body))) as service:
        scores = score(service)
    assert [one.cause for one in scores if isinstance(one, Unscored)] == ["none", *["not_finite"] * 3]


def test_a_row_that_json_cannot_hold_is_unscored() -> None:
    with serving(honest) as service:
        scores = score(service, [Sample("p", "7", "7", {"x": float("nan")}), Sample("p", "7", "7")], batch_size=1)
    assert isinstance(scores[0], Unscored) and scores[0].cause == "input" and scores[1] == 1.0


def test_odd_texts_arrive_as_they_are() -> None:
    text = '\x00\ud800 \N{GRINNING FACE} "\\'
    with serving(honest) as service:
        assert score(service, [Sample(text, text, text)]) == [1.0]
    assert service.asked[0]["samples"][0]["prompt"] == text


class TestToken:
    def test_is_sent_as_bearer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SCORER_TOKEN", f"{TOKEN}\n")
        with serving(honest) as service:
            assert score(service, token_env="SCORER_TOKEN") == [0.0, 1.0, 0.0, 1.0]
        assert service.headers[0]["Authorization"] == f"Bearer {TOKEN}"

    def test_none_is_sent_without_one(self) -> None:
        with serving(honest) as service:
            score(service)
        assert "Authorization" not in service.headers[0]

    @pytest.mark.parametrize(("value", "found"), [("", "is not set"), ("tok-CANARY\n-123", "no HTTP header can carry")])
    def test_that_cannot_be_used_is_named_by_its_variable(
        self, monkeypatch: pytest.MonkeyPatch, value: str, found: str
    ) -> None:
        monkeypatch.setenv("SCORER_TOKEN", value)
        with serving(honest) as service, pytest.raises(ConfigError, match=found) as caught:
            combined(service, token_env="SCORER_TOKEN")
        assert "SCORER_TOKEN" in str(caught.value) and "CANARY" not in str(caught.value)
        assert service.asked == []

    @pytest.mark.parametrize("status", [401, 503, 200])
    def test_is_shown_nowhere(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, status: int
    ) -> None:
        """Even a service that echoes it, with everything logged and every local variable of the traceback shown."""
        monkeypatch.setenv("SCORER_TOKEN", TOKEN)
        echo = Answer(status, f"Bearer {TOKEN} is unknown".encode())
        with serving(failing(99, echo)) as service, caplog.at_level(logging.DEBUG):
            shown = self.everything_about(service)
        assert TOKEN not in shown and "Bearer *** is unknown" in shown
        assert TOKEN not in caplog.text
        assert TOKEN in service.headers[0]["Authorization"]

    def everything_about(self, service: Service) -> str:
        options = config(service.url, token_env="SCORER_TOKEN", retries=0)
        shown = options.model_dump_json() + repr(options)
        with Reward((options,)) as reward:
            try:
                shown += repr(reward.score(ROWS))
            except ConfigError as error:
                shown += str(error) + repr(error.__dict__)
                assert error.__traceback__ is not None
                trace = error.__traceback__.tb_next  # the test's own frame knows what the service was sent
                while trace is not None:
                    shown += repr(trace.tb_frame.f_locals)
                    trace = trace.tb_next
        return shown
