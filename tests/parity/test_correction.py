"""Rollout correction against its definition, one row at a time."""

import math
import statistics

import pytest
import torch

from engine.algorithms.correction import rollout_weights
from tests.parity.ragged import close, logprobs, masks, padded, rows

MASK = masks()
OLD, SAMPLER = logprobs(MASK, 1), logprobs(MASK, 2)
LOG_RATIOS = [
    [o - s for o, s in zip(row, other, strict=True)]
    for row, other in zip(rows(OLD, MASK), rows(SAMPLER, MASK), strict=True)
]


def token(row):
    return [min(math.exp(x), 2.0) for x in row]


def icepop(row):
    return [math.exp(x) if 0.5 <= math.exp(x) <= 2.0 else 0.0 for x in row]


def sequence(row):
    return [min(math.prod(math.exp(x) for x in row), 2.0)] * len(row)


def geometric(row):
    kept = bool(row) and 0.8 <= math.exp(statistics.fmean(row)) <= 1.25
    return [float(kept)] * len(row)


CASES = [
    ("none", {}, lambda row: [1.0] * len(row)),
    ("token", {"cap": 2.0}, token),
    ("token", {"cap": 2.0, "floor": 0.7}, lambda row: [max(x, 0.7) for x in token(row)]),
    ("icepop", {"cap": 2.0, "floor": 0.5}, icepop),
    ("icepop", {"cap": 2.0}, lambda row: [math.exp(x) if math.exp(x) <= 2.0 else 0.0 for x in row]),
    ("sequence", {"cap": 2.0}, sequence),
    ("geometric", {"cap": 1.25, "floor": 0.8}, geometric),
]


@pytest.mark.parametrize(("mode", "options", "definition"), CASES)
def test_weights_equal_their_definition(mode, options, definition):
    weights, metrics = rollout_weights(OLD, SAMPLER, MASK, mode=mode, **options)
    expected = padded([definition(row) for row in LOG_RATIOS], MASK)
    close(weights, expected)
    assert len(weights[MASK].unique()) > 1 or mode == "none"
    rejected = (expected[MASK] == 0).double().mean().item()
    assert metrics["rollout/rejected_frac"][0].item() == pytest.approx(rejected)
    assert metrics["rollout/applied_weight_mean"][0].item() == pytest.approx(expected[MASK].mean().item())


@pytest.mark.parametrize("mode", ["none", "token", "icepop", "sequence", "geometric"])
def test_gap_metrics_are_the_same_in_every_mode(mode):
    _, metrics = rollout_weights(OLD, SAMPLER, MASK, mode=mode)
    gaps = [x for row in LOG_RATIOS for x in row]
    ratios = [math.exp(x) for x in gaps]
    expected = {
        "rollout/logprob_gap_mean": statistics.fmean(map(abs, gaps)),
        "rollout/logprob_gap_max": max(map(abs, gaps)),
        "rollout/kl_k1": -statistics.fmean(gaps),
        "rollout/kl_k3": statistics.fmean(r - 1 - math.log(r) for r in ratios),
        "rollout/weight_mean": statistics.fmean(ratios),
        "rollout/weight_square_mean": statistics.fmean(r * r for r in ratios),
        "rollout/ess_share": sum(ratios) ** 2 / sum(r * r for r in ratios) / len(ratios),
    }
    for name, value in expected.items():
        assert metrics[name][0].item() == pytest.approx(value), name
        assert metrics[name][1].item() == (1 if name.endswith("_max") else len(gaps)), name


def test_weights_carry_no_gradient():
    old = torch.where(MASK, OLD, 0.0).requires_grad_()
    weights, _ = rollout_weights(old, SAMPLER, MASK, mode="token")
    assert not weights.requires_grad
