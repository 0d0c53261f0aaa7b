"""The in-process rules."""

import re
from decimal import Decimal

import pytest

from engine.reward.rules import RuleScorer, exact_match, last_number, number, regex
from engine.reward.scorer import Sample, Unscored


@pytest.mark.parametrize(
    ("response", "answer", "ignore_case", "score"),
    [
        ("Paris", "Paris", False, 1.0),
        ("  Paris\n", "Paris", False, 1.0),
        ("Paris", " Paris ", False, 1.0),
        ("paris", "Paris", False, 0.0),
        ("paris", "Paris", True, 1.0),
        ("STRASSE", "straße", True, 1.0),
        ("Paris.", "Paris", False, 0.0),
        ("", "Paris", False, 0.0),
        ("", "", False, 1.0),
    ],
)
def test_exact_match(response: str, answer: str, ignore_case: bool, score: float) -> None:
    assert exact_match(Sample("p", response, answer), ignore_case=ignore_case) == score


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The answer is 42.", "42"),
        ("first 3, then 4", "4"),
        ("10-4", "4"),
        ("(2)-4", "4"),
        ("= -4", "-4"),
        ("\N{MINUS SIGN}4", "-4"),
        ("+7", "7"),
        ("1,234,567.50 euros", "1234567.50"),
        ("1,2,3", "3"),
        ("12,3456", "3456"),
        ("0.5", "0.5"),
        (".5", "0.5"),
        ("1.5e3", "1500"),
        ("007", "7"),
        ("none", None),
        ("", None),
        ("-", None),
    ],
)
def test_last_number(text: str, value: str | None) -> None:
    assert last_number(text) == (None if value is None else Decimal(value))


@pytest.mark.parametrize(
    ("response", "answer", "tolerance", "score"),
    [
        ("so it is 12", "12", 0.0, 1.0),
        ("so it is 12.0", "12", 0.0, 1.0),
        ("12 is not 13", "12", 0.0, 0.0),
        ("0.3", "0.2", 0.1, 1.0),
        ("0.30001", "0.2", 0.1, 0.0),
        ("123456789012345678901234567890123456789", "123456789012345678901234567890123456788", 0.0, 0.0),
        ("twelve", "12", 0.0, 0.0),
        ("12", "#### 12", 0.0, 1.0),
    ],
)
def test_number(response: str, answer: str, tolerance: float, score: float) -> None:
    assert number(Sample("p", response, answer), tolerance=tolerance) == score


def test_number_leaves_a_row_unscored_whose_answer_is_none() -> None:
    result = number(Sample("p", "12", "twelve"), tolerance=0.0)
    assert isinstance(result, Unscored)
    assert "twelve" in result.reason


def test_a_row_without_answer_is_unscored_not_wrong() -> None:
    assert isinstance(exact_match(Sample("p", "12"), ignore_case=False), Unscored)
    assert isinstance(number(Sample("p", "12"), tolerance=0.0), Unscored)


def test_regex_is_searched_anywhere() -> None:
    pattern = re.compile(r"<answer>\d+</answer>")
    assert regex(Sample("p", "so <answer>3</answer>!"), pattern=pattern) == 1.0
    assert regex(Sample("p", "so 3"), pattern=pattern) == 0.0


def test_a_rule_scorer_keeps_the_order() -> None:
    scorer = RuleScorer(lambda sample: float(len(sample.response)))
    assert scorer.score([Sample("p", "aa"), Sample("p", ""), Sample("p", "a")]) == [2.0, 0.0, 1.0]
    assert scorer.score([]) == []
