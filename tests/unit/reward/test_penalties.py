"""Penalties of length and repetition."""

import pytest

from engine.reward.penalties import length_penalty, repetition_penalty
from engine.reward.scorer import Sample


@pytest.mark.parametrize(
    ("tokens", "score"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (5000, -1.0)]
)
def test_length_is_free_up_to_the_buffer_and_then_falls_in_a_line(tokens: int, score: float) -> None:
    sample = Sample("p", "text", response_tokens=tokens)
    assert length_penalty(sample, max_tokens=100, buffer_tokens=20) == pytest.approx(score)


def test_no_penalty_is_no_minus_zero() -> None:
    assert str(length_penalty(Sample("p", ""), max_tokens=4, buffer_tokens=4)) == "0.0"


def test_a_buffer_of_all_tokens_penalises_from_the_first() -> None:
    assert length_penalty(Sample("p", "", response_tokens=1), max_tokens=4, buffer_tokens=4) == -0.25


@pytest.mark.parametrize(
    ("text", "ngram", "score"),
    [
        ("", 2, 0.0),
        ("one", 2, 0.0),
        ("one two three", 2, 0.0),
        ("a b a b", 2, -1 / 3),  # a b, b a, a b
        ("a b\nA  B", 2, -1 / 3),
        ("x x x x", 2, -2 / 3),
        ("x x x x", 1, -3 / 4),
        ("x x x x", 4, 0.0),
        ("ab ab", 3, 0.0),
    ],
)
def test_repeated_words(text: str, ngram: int, score: float) -> None:
    assert repetition_penalty(Sample("p", text), ngram=ngram, unit="words") == pytest.approx(score)


def test_repeated_characters_of_a_script_without_spaces() -> None:
    text = "あい" * 3  # ai, ia, ai, ia, ai
    assert repetition_penalty(Sample("p", text), ngram=2, unit="characters") == pytest.approx(-3 / 5)
    assert repetition_penalty(Sample("p", text), ngram=2, unit="words") == 0.0
