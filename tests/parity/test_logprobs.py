"""Sliced token log-probs and entropies against softmax written out, and their gradients against finite differences."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from engine.algorithms.logprobs import token_logprobs, token_logprobs_and_entropy

VOCABULARY = 13
LOGITS = torch.randn(3, 5, VOCABULARY, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
TARGETS = torch.randint(VOCABULARY, (3, 5), generator=torch.Generator().manual_seed(1))


def softmax(logits: list[float], temperature: float) -> list[float]:
    exponentials = [math.exp(x / temperature) for x in logits]
    return [x / sum(exponentials) for x in exponentials]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
@pytest.mark.parametrize("slice_elements", [1, 4 * VOCABULARY, 2**20], ids=["one-token", "four-tokens", "all"])
def test_log_probs_and_entropy_equal_their_definition(temperature, slice_elements):
    options = {"temperature": temperature, "slice_elements": slice_elements}
    found, entropy = token_logprobs_and_entropy(LOGITS, TARGETS, **options)
    for row in range(3):
        for t in range(5):
            p = softmax(LOGITS[row, t].tolist(), temperature)
            assert found[row, t].item() == pytest.approx(math.log(p[TARGETS[row, t]]), abs=1e-12)
            assert entropy[row, t].item() == pytest.approx(-sum(x * math.log(x) for x in p), abs=1e-12)
    torch.testing.assert_close(token_logprobs(LOGITS, TARGETS, **options), found)


@pytest.mark.parametrize("slice_elements", [2 * 5, 2**20], ids=["two-tokens", "all"])
def test_gradients_equal_finite_differences(slice_elements):
    options = {"temperature": 0.7, "slice_elements": slice_elements}
    logits, targets = LOGITS[0, :3, :5].clone().requires_grad_(), TARGETS[0, :3] % 5
    assert gradcheck(lambda x: token_logprobs(x, targets, **options), (logits,))
    assert gradcheck(lambda x: token_logprobs_and_entropy(x, targets, **options), (logits,))


def test_gradient_equals_that_of_torch_log_softmax_in_float32():
    logits = LOGITS.float().requires_grad_()
    again = LOGITS.float().requires_grad_()
    upstream = torch.linspace(-1, 1, 15).view(3, 5)
    (token_logprobs(logits, TARGETS, temperature=0.8, slice_elements=30) * upstream).sum().backward()
    whole = (again / 0.8).log_softmax(-1).gather(-1, TARGETS[..., None]).squeeze(-1)
    (whole * upstream).sum().backward()
    torch.testing.assert_close(logits.grad, again.grad, rtol=1e-5, atol=1e-6)
