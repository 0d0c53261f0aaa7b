"""The verifiers themselves, called in this process."""

import json
import threading
from typing import Any

import pytest

from engine.reward.scorer import Sample
from engine.reward.verifiers import (
    Verifier,
    function_verifier,
    json_schema_verifier,
    math_verifier,
    reading_verifier,
    reasoning_gym_verifier,
    regex_verifier,
)


@pytest.fixture(scope="module")
def maths() -> Verifier:
    return math_verifier()


@pytest.mark.parametrize(
    ("answer", "response", "score"),
    [
        ("1/3", r"\frac{1}{3}", 1.0),
        ("1/3", r"So the answer is $\frac{2}{6}$.", 1.0),
        (r"$\frac{1}{3}$", "1/3", 1.0),
        (r"\frac{1}{3}", r"\boxed{1/3}", 1.0),
        ("x+1", "$1+x$", 1.0),
        ("x+1", "$1-x$", 0.0),
        ("7", "The answer is 8", 0.0),
        ("7", "I do not know", 0.0),
        ("7", "", 0.0),
        ("1/3", "0.33", 0.0),
    ],
)
def test_math(maths: Verifier, answer: str, response: str, score: float) -> None:
    assert maths(Sample("p", response, answer)) == score


def test_math_works_outside_the_main_thread(maths: Verifier) -> None:
    """Alarm signals work only in a main thread; where they are on, every answer turns out wrong here."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(maths(Sample("p", r"\frac{1}{3}", "1/3"))))
    thread.start()
    thread.join()
    assert found == [1.0]


@pytest.mark.parametrize("answer", [None, "", "$$"])
def test_math_raises_where_the_answer_cannot_be_read(maths: Verifier, answer: str | None) -> None:
    """Otherwise a broken data column would make every response wrong."""
    with pytest.raises(ValueError, match="answer"):
        maths(Sample("p", "7", answer))


def test_regex_is_searched_anywhere() -> None:
    score = regex_verifier(r"<answer>\d+</answer>")
    assert score(Sample("p", "so <answer>3</answer>!")) == 1.0
    assert score(Sample("p", "so 3")) == 0.0


@pytest.fixture(scope="module")
def chain_sum() -> Verifier:
    return reasoning_gym_verifier("chain_sum")


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("19", 1.0),
        (" 19\n", 1.0),
        ("12 + 7 = 19", 1.0),
        ("<answer>18</answer> no, <answer> 19 </answer> and not 20", 1.0),
        ("19 <answer>18</answer>", 0.0),
        ("18", 0.0),
        ("", 0.0),
    ],
)
def test_reasoning_gym_judges_the_tagged_text_or_the_last_number(
    chain_sum: Verifier, response: str, score: float
) -> None:
    assert chain_sum(Sample("12 + 7 =", response, "19")) == score


def entry_of_word_sorting() -> tuple[str, str, dict[str, Any]]:
    import reasoning_gym

    entry = reasoning_gym.create_dataset("word_sorting", seed=3, size=1)[0]
    return entry["question"], entry["answer"], json.loads(json.dumps(entry["metadata"]))


@pytest.mark.parametrize("form", ["metadata", "extra_info", "text"])
def test_reasoning_gym_finds_the_metadata(form: str) -> None:
    question, answer, metadata = entry_of_word_sorting()
    forms: dict[str, dict[str, Any]] = {
        "metadata": {"metadata": metadata},
        "extra_info": {"extra_info": {"metadata": metadata}},
        "text": {"metadata": json.dumps(metadata)},
    }
    verifier = reasoning_gym_verifier("word_sorting")
    assert verifier(Sample(question, answer, answer, forms[form])) == 1.0
    assert verifier(Sample(question, "nothing", answer, forms[form])) == 0.0


def test_reasoning_gym_names_close_data_sets() -> None:
    with pytest.raises(ValueError, match=r"'chain_sums'.*chain_sum"):
        reasoning_gym_verifier("chain_sums")


def test_a_function_is_called_with_the_four_names() -> None:
    score = function_verifier("tests.unit.reward.functions:all_arguments")
    assert score(Sample("question", "reply", "42", {"level": 3})) == 1.0
    assert score(Sample("question", "reply", "42", {"level": 4})) == 0.0


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"$ref": "#/$defs/age"}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"age": {"type": "integer", "minimum": 0}},
}


@pytest.mark.parametrize(
    ("response", "fenced", "score"),
    [
        ('{"name": "Ada", "age": 36}', False, 1.0),
        (' {"name": "Ada"}\n', False, 1.0),
        ('{"name": "Ada", "age": -1}', False, 0.0),
        ('{"name": "Ada", "age": 1.5}', False, 0.0),
        ('{"age": 36}', False, 0.0),
        ('{"name": "Ada", "x": 1}', False, 0.0),
        ('Here: {"name": "Ada"}', False, 0.0),
        ('{"name": "Ada"', False, 0.0),
        ('{"name": "Ada", "age": NaN}', False, 0.0),
        ("", False, 0.0),
        ("[" * 100_000, False, 0.0),
        ('```json\n{"name": "Ada"}\n```', False, 0.0),
        ('So:\n```json\n{"name": "Ada"}\n```\nDone.', True, 1.0),
        ('```json\n{}\n```\n```json\n{"name": "Ada"}\n```', True, 1.0),
        ('```json\n{"name": "Ada"}\n```\n```json\n{}\n```', True, 0.0),
        ('{"name": "Ada"}', True, 1.0),
        ('```json\n{"name": "Ada"}', True, 0.0),
    ],
)
def test_json_schema(response: str, fenced: bool, score: float) -> None:
    assert json_schema_verifier(PERSON, fenced)(Sample("p", response)) == score


def test_a_schema_may_follow_an_older_draft() -> None:
    verify = json_schema_verifier({"$schema": "http://json-schema.org/draft-04/schema#", "maximum": 3}, False)
    assert [verify(Sample("p", text)) for text in ("3", "4")] == [1.0, 0.0]


def test_no_reference_is_fetched() -> None:
    verify = json_schema_verifier({"$ref": "http://127.0.0.1:1/schema.json"}, False)
    with pytest.raises(Exception, match="Unresolvable"):
        verify(Sample("p", "3"))


@pytest.mark.parametrize(("reply", "number"), [("Score: 3", 3.0), ("Score: 3, then Score: 4.5", 4.5), ("none", None)])
def test_the_last_match_in_a_reply_is_read(reply: str, number: float | None) -> None:
    assert reading_verifier(r"Score: (\d+(?:\.\d+)?)")(Sample("", reply)) == number
