"""Reports about held-out rows against their definitions, on numbers small enough to work out by hand."""

import math

import pytest
import torch

from engine.dataflows.ranking import calibration, histogram, likelihood_report, ranking_report


def test_accuracy_counts_ties_by_half_and_leaves_out_what_has_no_score() -> None:
    upper = torch.tensor([2.0, 1.0, 0.0, math.nan])
    lower = torch.tensor([1.0, 1.0, 3.0, 0.0])
    report = ranking_report(upper, lower, bins=2)
    assert (report["rows"], report["unscored"]) == (4, 1)
    assert report["score_mean"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert report["margin_mean"] == pytest.approx((1 + 0 - 3) / 3)


def test_no_score_is_no_number_not_zero() -> None:
    report = ranking_report(torch.tensor([math.nan]), torch.tensor([0.0]), bins=2)
    assert report == {"rows": 1, "unscored": 1, "score_mean": None}


def test_the_calibration_error_is_that_of_the_definition() -> None:
    margins = [0.1, -0.1, 0.4, 3.0, 4.0, -5.0, 0.0]
    bins = 4
    expected = 0.0
    for number in range(bins):
        low, high = 0.5 + number / 8, 0.5 + (number + 1) / 8
        inside = [m for m in margins if low <= 1 / (1 + math.exp(-abs(m))) < high]
        if inside:
            confidence = sum(1 / (1 + math.exp(-abs(m))) for m in inside) / len(inside)
            accuracy = sum(1.0 if m > 0 else 0.5 if m == 0 else 0.0 for m in inside) / len(inside)
            expected += len(inside) / len(margins) * abs(confidence - accuracy)
    error, table = calibration(torch.tensor(margins, dtype=torch.float64), bins)
    assert error == pytest.approx(expected)
    assert sum(entry["pairs"] for entry in table) == len(margins)
    assert [entry["from"] for entry in table] == [0.5, 0.625, 0.75, 0.875] and table[-1]["to"] == 1.0


def test_a_sure_and_right_model_is_calibrated_and_a_sure_and_wrong_one_is_not() -> None:
    assert calibration(torch.full((5,), 40.0), 10)[0] == pytest.approx(0.0, abs=1e-6)
    assert calibration(torch.full((5,), -40.0), 10)[0] == pytest.approx(1.0)


def test_every_margin_is_in_the_histogram() -> None:
    made = histogram(torch.tensor([-1.0, -0.9, 0.0, 1.0], dtype=torch.float64), 4)
    assert made["edges"] == [-1.0, -0.5, 0.0, 0.5, 1.0]
    assert made["counts"] == [2, 0, 1, 1]
    assert sum(histogram(torch.zeros(3, dtype=torch.float64), 4)["counts"]) == 3


def test_likelihood_is_per_token() -> None:
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, 9.0]])
    report = likelihood_report(logprobs, torch.tensor([[True, True], [True, False]]))
    assert report["nll"] == pytest.approx(2.0) and report["score_mean"] == -report["nll"] and report["tokens"] == 3
