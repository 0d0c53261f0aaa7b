"""Rollout correction: no gap, huge gaps, rejected rows, garbage outside the mask, empty batches, refused options."""

import math

import pytest
import torch

from engine.algorithms.correction import MODES, rejected_rows, rollout_weights
from engine.errors import ShapeError

NAN = math.nan
MASK = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])
SAMPLER = torch.full((3, 3), -1.0)


@pytest.mark.parametrize("mode", MODES)
def test_without_a_gap_every_mode_is_the_identity(mode):
    weights, metrics = rollout_weights(SAMPLER, SAMPLER, MASK, mode=mode)
    assert weights.tolist() == MASK.float().tolist()
    values = {name: value.item() for name, (value, _) in metrics.items()}
    ones = {"rollout/weight_mean", "rollout/weight_square_mean", "rollout/ess_share", "rollout/applied_weight_mean"}
    assert values == {name: float(name in ones) for name in values}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gap", [100.0, -100.0])
def test_a_huge_gap_stays_finite_and_is_reported(mode, gap):
    weights, metrics = rollout_weights(SAMPLER + gap, SAMPLER, MASK, mode=mode)
    assert weights.isfinite().all()
    assert weights.max() <= 2.0
    assert all(value.isfinite() for value, _ in metrics.values())
    assert metrics["rollout/logprob_gap_max"][0].item() == 100
    assert metrics["rollout/logprob_gap_mean"][0].item() == 100


@pytest.mark.parametrize("mode", MODES)
def test_garbage_outside_the_mask_changes_nothing(mode):
    old = torch.where(MASK, SAMPLER + 0.3, NAN)
    clean, expected = rollout_weights(SAMPLER + 0.3, SAMPLER, MASK, mode=mode)
    weights, metrics = rollout_weights(old, torch.where(MASK, SAMPLER, math.inf), MASK, mode=mode)
    assert weights.tolist() == clean.tolist()
    assert metrics == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3)], ids=str)
def test_no_response_token(mode, shape):
    weights, metrics = rollout_weights(
        torch.zeros(shape), torch.ones(shape), torch.zeros(shape, dtype=torch.bool), mode=mode
    )
    assert weights.eq(0).all() and weights.shape == shape
    assert all(weight.item() == 0 and value.isfinite() for value, weight in metrics.values())


def test_one_bad_token_in_each_mode():
    """Log ratios 0, 0, 3 in the first row and 0, 0 in the second."""
    old = SAMPLER.clone()
    old[0, 2] += 3.0
    rows = {mode: rollout_weights(old, SAMPLER, MASK, mode=mode, cap=2.0)[0][:2].tolist() for mode in MODES}
    assert rows == {
        "none": [[1, 1, 1], [1, 1, 0]],
        "token": [[1, 1, 2], [1, 1, 0]],
        "icepop": [[1, 1, 0], [1, 1, 0]],
        "sequence": [[2, 2, 2], [1, 1, 0]],
        "geometric": [[0, 0, 0], [1, 1, 0]],
    }


def test_rejected_rows_are_those_with_tokens_and_no_weight():
    old = SAMPLER.clone()
    old[0] += 2.0
    weights, metrics = rollout_weights(old, SAMPLER, MASK, mode="geometric", cap=2.0, floor=0.5)
    assert rejected_rows(weights, MASK).tolist() == [True, False, False]
    assert metrics["rollout/rejected_frac"][0].item() == pytest.approx(3 / 5)
    weights, _ = rollout_weights(old, SAMPLER, MASK, mode="token")
    assert rejected_rows(weights, MASK).tolist() == [False, False, False]


def test_nan_inside_the_mask_is_not_hidden():
    weights, metrics = rollout_weights(torch.where(MASK, NAN, 0.0), SAMPLER, MASK, mode="token")
    assert weights[MASK].isnan().all()
    assert metrics["rollout/logprob_gap_max"][0].isnan()


def test_refusals():
    for options, message in [
        ({"mode": "clip"}, "geometric.*'clip'"),
        ({"mode": "none", "floor": 0.5}, "no use in mode 'none'"),
        ({"mode": "icepop", "floor": 3.0}, "floor <= cap"),
        ({"mode": "token", "cap": 0.0}, "cap > 0"),
        ({"mode": "token", "floor": -1.0}, "0 <= floor"),
    ]:
        with pytest.raises(ValueError, match=message):
            rollout_weights(SAMPLER, SAMPLER, MASK, **options)
    with pytest.raises(ShapeError, match="rollout_logprobs"):
        rollout_weights(SAMPLER, SAMPLER[:2], MASK, mode="token")
