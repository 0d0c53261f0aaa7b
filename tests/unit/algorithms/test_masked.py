"""Masked reductions: garbage outside the mask, nothing inside it, dtypes, and how metrics say what they weigh."""

import math

import pytest
import torch

from engine.algorithms import masked
from engine.errors import ShapeError

NAN = math.nan
GARBAGE = torch.tensor([[1.0, NAN, 3.0], [math.inf, -math.inf, NAN], [5.0, 7.0, 9.0]])
MASK = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])


def test_garbage_outside_the_mask_changes_nothing():
    assert masked.masked_sum(GARBAGE, MASK).item() == 25
    assert masked.masked_sum(GARBAGE, MASK, -1).tolist() == [4, 0, 21]
    assert masked.masked_mean(GARBAGE, MASK).item() == 5
    assert masked.masked_mean(GARBAGE, MASK, 1).tolist() == [2, 0, 7]
    assert masked.masked_mean(GARBAGE, MASK, 0).tolist() == [3, 7, 6]
    assert masked.masked_whiten(GARBAGE, MASK)[~MASK].tolist() == [0] * 4


def test_the_gradient_outside_the_mask_is_exactly_zero():
    x = GARBAGE.clone().requires_grad_()
    masked.masked_mean(x, MASK).backward()
    assert x.grad.tolist() == (MASK / 5).tolist()


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0), (2, 3)], ids=str)
def test_no_true_entry_gives_zero_and_a_gradient_of_zero(shape):
    x, mask = torch.zeros(shape, requires_grad=True), torch.zeros(shape, dtype=torch.bool)
    total = masked.masked_sum(x, mask) + masked.masked_mean(x, mask) + masked.masked_mean(x, mask, -1).sum()
    total.backward()
    assert total.item() == 0
    assert x.grad.tolist() == torch.zeros(shape).tolist()
    assert masked.masked_whiten(x, mask).tolist() == torch.zeros(shape).tolist()
    assert [float(v) for v in masked.mean_metric(x, mask)] == [0, 0]
    assert [float(v) for v in masked.max_metric(x, mask)] == [0, 0]


def test_whitened_entries_have_mean_zero_and_sample_std_one():
    white = masked.masked_whiten(GARBAGE, MASK)[MASK]
    assert white.mean().item() == pytest.approx(0, abs=1e-6)
    assert white.std(correction=1).item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("value", [0.1, -3.3, 1e6])
def test_entries_without_spread_whiten_to_exact_zeros(value):
    x = torch.full((3, 3), value)
    assert masked.masked_whiten(x, torch.ones(3, 3, dtype=torch.bool)).eq(0).all()
    one = torch.zeros(3, 3, dtype=torch.bool)
    one[1, 1] = True
    assert masked.masked_whiten(x, one).eq(0).all()


def test_rounding_noise_is_not_blown_up():
    x = 1 + torch.tensor([[0.0, 1e-7, 0.0, 2e-7]])
    assert masked.masked_whiten(x, torch.ones(1, 4, dtype=torch.bool)).abs().max() < 0.01


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.int64, torch.float32),
    ],
)
def test_maths_runs_in_float32_or_wider(given, found):
    x = torch.ones(2, 3000).to(given)
    mask = torch.ones(2, 3000, dtype=torch.bool)
    total = masked.masked_sum(x, mask)
    assert total.dtype == found
    assert total.item() == 6000  # bfloat16 would stop at 256


def test_nan_inside_the_mask_is_not_hidden():
    x = torch.tensor([[1.0, NAN]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert masked.masked_mean(x, mask).isnan()
    assert masked.masked_whiten(x, mask).isnan().all()
    assert masked.max_metric(x, mask)[0].isnan()


def test_a_mask_that_does_not_fit_is_refused_by_name():
    with pytest.raises(ShapeError, match=r"\(3, 3\).*'x': \(2, 3\)"):
        masked.masked_sum(torch.zeros(2, 3), MASK)
    with pytest.raises(ShapeError, match=r"bool.*int64"):
        masked.masked_sum(torch.zeros(3, 3), MASK.long())


def test_scored_mask_drops_rows_without_a_finite_score():
    mask = torch.ones(4, 2, dtype=torch.bool)
    kept = masked.scored_mask(torch.tensor([1.0, NAN, -math.inf, 0.0]), mask)
    assert kept.tolist() == [[True, True], [False, False], [False, False], [True, True]]


def test_metrics_are_detached_means_with_their_weight():
    x = torch.tensor([[2.0, 4.0, 9.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    assert [v.item() for v in masked.mean_metric(x, mask)] == [3, 2]
    assert [v.item() for v in masked.max_metric(x, mask)] == [4, 1]
    assert [v.item() for v in masked.mean_metric(x > 3, mask)] == [0.5, 2]
    assert not any(v.requires_grad for v in (*masked.mean_metric(x, mask), *masked.max_metric(x, mask)))
