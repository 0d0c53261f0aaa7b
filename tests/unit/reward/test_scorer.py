"""What counts as a score."""

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from engine.reward.scorer import Unscored, as_score


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (1, 1.0),
        (0.25, 0.25),
        (True, 1.0),
        (False, 0.0),
        (-3, -3.0),
        (Fraction(1, 2), 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
    ],
)
def test_numbers_and_booleans_are_scores(value: Any, score: float) -> None:
    result = as_score(value)
    assert type(result) is float
    assert result == score


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_what_is_not_finite_is_unscored(value: Any) -> None:
    result = as_score(value)
    assert isinstance(result, Unscored)
    assert result.cause == "not_finite"


def test_none_is_unscored() -> None:
    result = as_score(None)
    assert isinstance(result, Unscored)
    assert result.cause == "none"


@pytest.mark.parametrize(
    "value", ["1.0", {"score": 1.0}, [1.0], (1.0,), np.ones((4, 1)), np.ones(()), Decimal(1), 1j, len]
)
def test_other_types_are_rejected_by_name(value: Any) -> None:
    result = as_score(value)
    assert isinstance(result, Unscored)
    assert result.cause == "type"
    assert type(value).__name__ in result.reason
