"""The in-process rules."""

from decimal import Decimal

import pytest

from engine.reward.rules import RuleScorer, choice, exact_match, last_choice, last_number, number, tagged
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


def test_a_rule_scorer_keeps_the_order() -> None:
    scorer = RuleScorer(lambda sample: float(len(sample.response)))
    assert scorer.score([Sample("p", "aa"), Sample("p", ""), Sample("p", "a")]) == [2.0, 0.0, 1.0]
    assert scorer.score([]) == []


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (B)", "B"),
        ("The answer is B.", "B"),
        ("the ANSWER is: **C**", "C"),
        ("Answer: D", "D"),
        ("**Answer:** D", "D"),
        ("Answer:\nB) Paris", "B"),
        ("answer = B", "B"),
        ("so \\boxed{C}", "C"),
        ("The final answer is: $\\boxed{B}$", "B"),
        ("The correct option is A because (B) is too long", "A"),
        ("The answer is A. No, the answer is D, not B.", "D"),
        ("<think>maybe C</think><answer>B</answer>", "B"),
        ("B", "B"),
        ("(B)", "B"),
        ("It is not A but B.", "B"),
        ("I'd say C", "C"),
        ("A cat sits. B) fits. A dog too.", "B"),
        ("A", "A"),
        ("The answer is option B", "B"),
        ("Vitamin-C, Abc, D3", None),
        ("the answer is b", None),
        ("E", None),
        ("", None),
    ],
)
def test_last_choice(text: str, letter: str | None) -> None:
    assert last_choice(text, "ABCD") == letter


def test_a_choice_is_found_in_any_text_at_once() -> None:
    """No quantifier of the patterns may grow with the text: an hour of white space is no attack."""
    assert last_choice("answer" + " " * 1_000_000 + ("answer is " * 100_000) + "B", "ABCD") == "B"


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [("The answer is (B)", "B", 1.0), ("B", "(B) Paris", 1.0), ("The answer is C", "B", 0.0), ("Paris", "B", 0.0)],
)
def test_choice(response: str, answer: str, score: float) -> None:
    assert choice(Sample("p", response, answer), choices="ABCD") == score


def test_choices_may_be_other_letters() -> None:
    assert choice(Sample("p", "It is E", "E"), choices="ABCDE") == 1.0
    assert choice(Sample("p", "N", "N"), choices="YN") == 1.0


@pytest.mark.parametrize("answer", [None, "2", "E", "Paris"])
def test_an_answer_that_names_no_choice_leaves_the_sample_unscored(answer: str | None) -> None:
    assert isinstance(choice(Sample("p", "B", answer), choices="ABCD"), Unscored)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>\na\n</think>\n\n<answer></answer>\n", 1.0),
        ("<think>a < b <b></think><answer>b</answer>", 1.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think>x<answer>b</answer>", 0.0),
        ("x<think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer>x", 0.0),
        ("<think>a<answer>b</think></answer>", 0.0),
        ("<think>a<think></think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a</think>", 0.0),
        ("</think>a<think><answer>b</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_tagged_parts(response: str, score: float) -> None:
    assert tagged(Sample("p", response), tags=("think", "answer")) == score
