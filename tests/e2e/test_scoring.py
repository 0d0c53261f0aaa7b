"""Scoring inside a session: a service on this machine scores a run, fails in part, and fails as a whole."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.data.promptfile import load_prompts
from engine.errors import ConfigError, TransientError
from engine.experience import drawn_prompts
from engine.session import Session
from engine.store import StepRef
from tests.helpers.runs import tiny_run
from tests.unit.reward.service import Answer, Service, honest, serving

pytestmark = pytest.mark.e2e
TOKEN = "tok-CANARY-123"


def session_of(folder: Path, service: Service, **sections: Any) -> tuple[Session, StepRef]:
    """A session before its first rollout, and the start checkpoint; the service's scores and a penalty add up."""
    remote = {"kind": "http", "url": service.url, "retries": 1, "backoff_s": 0.01, "token_env": "SCORER_TOKEN"}
    penalty = {"kind": "length_penalty", "max_tokens": 4, "buffer_tokens": 2, "weight": 0.5}
    run, data = tiny_run(folder, reward=[remote | {"batch_size": 4}, penalty], **sections)
    session = Session(run)
    return session, session.start(data)


def after_the_canary(answer: Callable[[Any], Answer | None]) -> Callable[[int, Any], Answer]:
    """Honest scores where the answer is None. The canary is eight right and eight wrong responses in four calls."""

    def scripted(number: int, body: Any) -> Answer:
        return (answer(body) if number >= 4 else None) or honest(number, body)

    return scripted


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORER_TOKEN", TOKEN)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_what_a_service_cannot_score_is_committed_beside_the_experience(tmp_path: Path) -> None:
    """One group of four samples is lost; the run learns from the others and says which it did not learn from."""

    def answer(body: Any) -> Answer | None:
        return Answer(500, b"no") if body["samples"][0]["prompt"] in lost else None

    lost: list[str] = []
    with serving(after_the_canary(answer)) as service:
        session, start = session_of(tmp_path, service, max_unscored_share=0.25)
        prompts = load_prompts(session.run.store.read(session.run.store.committed("data")) / "train.parquet")
        lost.append(drawn_prompts(prompts, session.run.config, 1).column("prompt")[0])
        experience = session.rollout(1, start)
        learned = session.train(1, experience)
        session.close()
    folder = session.run.store.read(experience)
    rows = lines(folder / "unscored.jsonl")
    assert [(row["sample"], row["component"], row["prompt"]) for row in rows] == [
        (sample, "http", lost[0]) for sample in range(4)
    ]
    assert "failed 2 times; the last time: 500 no" in rows[0]["reason"]
    metrics = session.run.store.manifest(learned).metrics
    assert metrics["reward/unscored_share"] == metrics["reward/http_unscored_share"] == 0.25
    assert metrics["reward/length_penalty_unscored_share"] == 0.0
    assert -1.0 <= metrics["reward/length_penalty_mean"] <= 0.0


def test_an_outage_fails_the_step_and_the_step_succeeds_once_it_is_over(tmp_path: Path) -> None:
    down = [True]
    answer = after_the_canary(lambda body: Answer(503, b"down") if down[0] else None)
    with serving(answer) as service:
        session, start = session_of(tmp_path, service)
        with pytest.raises(TransientError, match=r"allows 0\.1, but 16 of 16 samples"):
            session.rollout(1, start)
        left = session.run.store.folder / "unscored-iterations-00001-rollout.jsonl"
        assert len(lines(left)) == 16
        down[0] = False
        experience = session.rollout(1, start)
        session.close()
    assert not left.exists()
    assert not (session.run.store.read(experience) / "unscored.jsonl").exists()


def test_an_outage_fails_an_evaluation_as_well(tmp_path: Path) -> None:
    with serving(after_the_canary(lambda body: Answer(503, b"down"))) as service:
        session, start = session_of(tmp_path, service)
        with pytest.raises(TransientError, match="5 of 5 samples"):
            session.evaluate(0, start)
    assert (session.run.store.folder / "unscored-evaluation-00000-held_out.jsonl").exists()


@pytest.mark.parametrize("status", [401, 503])
def test_no_token_is_written_or_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], status: int
) -> None:
    """Although the service repeats it in every reply, and everything is logged."""
    echo = Answer(status, f"token {TOKEN}".encode())
    with serving(after_the_canary(lambda body: echo)) as service, caplog.at_level(logging.DEBUG):
        session, start = session_of(tmp_path, service)
        with pytest.raises((ConfigError, TransientError)) as caught:
            session.rollout(1, start)
    output = capfd.readouterr()
    assert f"{status} token ***" in str(caught.value) and TOKEN not in str(caught.value)
    assert TOKEN not in caplog.text + output.out + output.err
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert session.run.store.folder / "run.json" in files
    assert [file for file in files if TOKEN.encode() in file.read_bytes()] == []
