"""The rows of the presets: regenerated the same, disjoint, and answered rightly by their own verifier."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from engine.reward.scorer import Sample
from engine.reward.verifiers import reasoning_gym_verifier

DATA = Path(__file__).parents[3] / "deployments" / "presets" / "data"


def read(name: str) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (DATA / "chain_sum" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def question(row: dict[str, Any]) -> str:
    return str(row["prompt"][0]["content"])


def test_the_script_writes_these_very_files(tmp_path: Path) -> None:
    script = tmp_path / "make_chain_sum.py"
    script.write_text((DATA / "make_chain_sum.py").read_text(encoding="utf-8"), encoding="utf-8")
    runpy.run_path(str(script), run_name="__main__")
    for name in ("train", "eval"):
        written = (tmp_path / "chain_sum" / f"{name}.jsonl").read_bytes()
        assert written == (DATA / "chain_sum" / f"{name}.jsonl").read_bytes()


def test_no_question_occurs_twice() -> None:
    questions = [question(row) for row in read("train") + read("eval")]
    assert (len(read("train")), len(read("eval"))) == (1000, 128)
    assert len(set(questions)) == len(questions)


@pytest.mark.parametrize("name", ["train", "eval"])
def test_the_verifier_accepts_every_answer_and_no_other(name: str) -> None:
    score = reasoning_gym_verifier("chain_sum")
    for row in read(name):
        wrong = str(int(row["answer"]) + 1)
        assert score(Sample(question(row), row["answer"], row["answer"], row["extra_info"])) == 1.0
        assert score(Sample(question(row), wrong, row["answer"], row["extra_info"])) != 1.0
