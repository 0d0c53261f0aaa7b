"""Metrics combine as if everything had been measured in one go, however it was split."""

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.metrics import Metric, Metrics, from_pairs, merge

finite = st.floats(-1e6, 1e6)
samples = st.lists(st.tuples(finite, st.integers(0, 5)), min_size=1, max_size=20)


@given(samples, st.integers(1, 6))
def test_a_mean_over_parts_is_the_mean_over_all(values: list[tuple[float, int]], parts: int):
    pieces = [values[start::parts] for start in range(parts)]
    metrics = merge(from_pairs({"m": pair}) for piece in pieces for pair in piece)
    total = sum(w for _, w in values)
    if total == 0:
        assert math.isnan(metrics["m"])
    else:
        assert metrics["m"] == pytest.approx(sum(v * w for v, w in values) / total, rel=1e-9, abs=1e-6)


@given(st.lists(finite, min_size=1, max_size=10))
def test_sum_max_and_min_over_parts(values: list[float]):
    metrics = merge(Metrics({"s": Metric(v, "sum"), "h": Metric(v, "max"), "l": Metric(v, "min")}) for v in values)
    assert metrics["s"] == pytest.approx(sum(values), abs=1e-6)
    assert (metrics["h"], metrics["l"]) == (max(values), min(values))


def test_nothing_measured_is_nan_and_disturbs_nobody():
    nothing = from_pairs({"loss": (torch.tensor(0.0), torch.tensor(0.0)), "gap_max": (0.0, 0), "seen_count": (0.0, 0)})
    assert math.isnan(nothing["loss"]) and math.isnan(nothing["gap_max"]) and nothing["seen_count"] == 0.0
    some = from_pairs({"loss": (2.0, 3), "gap_max": (-1.0, 3), "seen_count": (4.0, 3)})
    for both in (nothing | some, some | nothing):
        assert both.values() == {"gap_max": -1.0, "loss": 2.0, "seen_count": 4.0}


def test_a_mean_with_weight_zero_never_leaks_its_value():
    metrics = Metrics({"m": Metric(math.nan, "mean", 0.0)}) | Metrics({"m": Metric(5.0, "mean", 2.0)})
    assert metrics["m"] == 5.0


def test_a_measured_nan_is_not_hidden():
    assert math.isnan((Metrics({"m": Metric(math.nan)}) | Metrics({"m": Metric(5.0)}))["m"])


@pytest.mark.parametrize(
    ("name", "expected"), [("a/x_max", 3.0), ("a/x_min", 1.0), ("a/x_count", 4.0), ("a/x", 1.5), ("a/x_mean", 1.5)]
)
def test_the_name_decides_the_rule(name: str, expected: float):
    both = from_pairs({name: (3.0, 1)}) | from_pairs({name: (1.0, 3)})
    assert both[name] == expected


def test_two_rules_for_one_name_are_a_fault():
    with pytest.raises(ValueError, match="sum"):
        Metrics({"m": Metric(1.0, "sum")}) | Metrics({"m": Metric(1.0, "max")})


def test_names_of_both_sides_are_kept_and_sorted():
    metrics = Metrics({"b": Metric(1.0)}) | Metrics({"a": Metric(2.0)})
    assert list(metrics.values()) == ["a", "b"] and "a" in metrics and "c" not in metrics


def test_combining_changes_neither_side():
    left, right = Metrics({"m": Metric(1.0, "sum")}), Metrics({"m": Metric(2.0, "sum")})
    assert (left | right)["m"] == 3.0 and left["m"] == 1.0 and right["m"] == 2.0


def test_metrics_travel_between_processes():
    metrics = Metrics({"m": Metric(1.5, "mean", 3.0)})
    copy = pickle.loads(pickle.dumps(metrics))  # noqa: S301 - of our own making
    assert (copy | Metrics({"m": Metric(0.5, "mean", 1.0)}))["m"] == 1.25
