"""KL estimators and reward shaping against their definitions; k1 and k3 against the exact KL of two distributions."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from engine.algorithms.kl import K3_LIMIT, kl_estimate, shape_rewards
from tests.parity.ragged import close, logprobs, masks, padded, rows

DEFINITIONS = {
    "k1": lambda d: d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: math.exp(-d) + d - 1,
    "abs": abs,
}


@pytest.mark.parametrize("kind", DEFINITIONS)
def test_kl_estimate_equals_its_definition(kind):
    mask = masks()
    new, ref = logprobs(mask, 1) * 3, logprobs(mask, 2) * 3
    expected = [
        [DEFINITIONS[kind](n - r) for n, r in zip(row, ref_row, strict=True)]
        for row, ref_row in zip(rows(new, mask), rows(ref, mask), strict=True)
    ]
    close(kl_estimate(new, ref, kind, response_mask=mask), padded(expected, mask), 1e-10)


@pytest.mark.parametrize("kind", DEFINITIONS)
def test_kl_gradient_equals_finite_differences(kind):
    d = torch.tensor([-40.0, -K3_LIMIT - 0.1, -3.0, -0.5, 0.7, 4.0, 60.0], dtype=torch.float64, requires_grad=True)
    reference = torch.full_like(d, -1.0).detach()
    assert gradcheck(lambda x: kl_estimate(x - 1.0, reference, kind), (d,), rtol=1e-4)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_expectation_is_the_exact_kl(kind):
    """Weighted by the policy over the whole vocabulary, k1 and k3 are unbiased."""
    policy = torch.randn(40, generator=torch.Generator().manual_seed(3), dtype=torch.float64).log_softmax(0)
    reference = torch.randn(40, generator=torch.Generator().manual_seed(4), dtype=torch.float64).log_softmax(0)
    exact = torch.nn.functional.kl_div(reference, policy, log_target=True, reduction="sum")
    close((policy.exp() * kl_estimate(policy, reference, kind)).sum(), exact)


def test_shape_rewards_equals_its_definition():
    mask = masks()
    old, ref = logprobs(mask, 1), logprobs(mask, 2)
    scores = [1.0, -2.0, 3.0, 0.5, 0.0, 0.25]
    expected = []
    for score, o, r in zip(scores, rows(old, mask), rows(ref, mask), strict=True):
        tokens = [-0.3 * (x - y) for x, y in zip(o, r, strict=True)]
        expected.append([*tokens[:-1], tokens[-1] + score] if tokens else [])
    close(shape_rewards(torch.tensor(scores), old, ref, mask, 0.3), padded(expected, mask))
