"""Errors travel between processes whole, say what to do, and decide exit code and retry."""

import pickle

import pytest

from engine import errors
from engine.errors import (
    ConfigError,
    DataError,
    DeviceMemoryError,
    HybridFlowError,
    Problem,
    ShapeError,
    StoreError,
    TransientError,
)

ALL = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HybridFlowError)]
CODES = {
    "ConfigError": 2,
    "DataError": 2,
    "DivergedError": 4,
    "TransientError": 5,
    "DeviceMemoryError": 5,
    "StoreError": 5,
    "WorkerError": 5,
    "ShapeError": 5,
    "CancelledError": 130,
    "HybridFlowError": 5,
    "_ProblemsError": 2,
}


@pytest.mark.parametrize("kind", ALL)
def test_pickling_keeps_everything(kind: type[HybridFlowError]):
    error = kind("asked for 3, found 2.", remedy="Ask for 2.", role="policy", rank=1)
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - of our own making
    assert type(copy) is kind and str(copy) == str(error)
    assert (copy.message, copy.remedy, copy.where) == (error.message, error.remedy, {"role": "policy", "rank": 1})


@pytest.mark.parametrize("kind", [ConfigError, DataError])
def test_pickling_keeps_the_problems(kind: type[ConfigError]):
    error = kind("cannot be used:", problems=[Problem("train.lr", -1.0, "must be positive")])
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - of our own making
    assert copy.problems == error.problems and "  - train.lr = -1.0: must be positive" in str(copy)


def test_the_text_has_message_place_and_remedy_in_this_order():
    error = TransientError("The engine did not answer.", remedy="Resume.", role="rollout", rank=0)
    assert str(error) == "The engine did not answer. [role rollout, rank 0] Resume."


def test_all_problems_are_listed():
    text = str(ConfigError("Bad:", problems=[Problem("a", 1, "x"), Problem("b", "2", "y")]))
    assert text == "Bad:\n  - a = 1: x\n  - b = '2': y"


def test_exit_codes_are_the_published_ones():
    assert {kind.__name__: kind.exit_code for kind in ALL} == CODES


def test_only_what_may_pass_by_itself_is_retried():
    assert {kind for kind in ALL if kind.retryable} == {TransientError, DeviceMemoryError}


def test_a_shape_error_is_a_value_error_and_a_store_error_is_not():
    assert issubclass(ShapeError, ValueError) and not issubclass(StoreError, ValueError)
