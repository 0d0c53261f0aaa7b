"""DPO, reward model and cost model losses against their definitions, pair by pair."""

import math
import statistics

import pytest
import torch
from torch.autograd import gradcheck

from engine.algorithms.preference import DPO_KINDS, bradley_terry_loss, cost_model_loss, dpo_loss
from tests.parity.ragged import close, logprobs, masks, rows

CHOSEN_MASK = masks((4, 6, 0, 2, 7), 7)
REJECTED_MASK = masks((3, 1, 5, 5, 2), 5)
SIDES = [
    logprobs(CHOSEN_MASK, 1),
    logprobs(REJECTED_MASK, 2),
    logprobs(CHOSEN_MASK, 3),
    logprobs(REJECTED_MASK, 4),
]


def minus_log_sigmoid(x: float) -> float:
    return math.log(1 + math.exp(-x))


def dpo_pair(kind: str, beta: float, chosen, rejected, ref_chosen, ref_rejected) -> float:
    gain = sum(chosen) - sum(ref_chosen), sum(rejected) - sum(ref_rejected)
    if kind == "sigmoid":
        return minus_log_sigmoid(beta * (gain[0] - gain[1]))
    if kind == "ipo":
        return (gain[0] - gain[1] - 1 / (2 * beta)) ** 2
    return minus_log_sigmoid(beta * (gain[0] / len(chosen) - gain[1] / len(rejected)))


@pytest.mark.parametrize("kind", DPO_KINDS)
def test_dpo_equals_its_definition(kind):
    found = dpo_loss(*SIDES, CHOSEN_MASK, REJECTED_MASK, kind=kind, beta=0.4)
    sides = [rows(x, m) for x, m in zip(SIDES, (CHOSEN_MASK, REJECTED_MASK) * 2, strict=True)]
    pairs = [pair for pair in zip(*sides, strict=True) if all(pair)]
    assert len(pairs) == 4
    close(found.loss, statistics.fmean(dpo_pair(kind, 0.4, *pair) for pair in pairs))


@pytest.mark.parametrize("kind", DPO_KINDS)
def test_dpo_gradient_equals_finite_differences(kind):
    chosen, rejected, *reference = (torch.nan_to_num(x) for x in SIDES)

    def loss(c, r):
        return dpo_loss(c, r, *reference, CHOSEN_MASK, REJECTED_MASK, kind=kind, beta=0.4).loss

    assert gradcheck(loss, (chosen.requires_grad_(), rejected.requires_grad_()))


def test_bradley_terry_with_and_without_margin():
    chosen, rejected, margin = [1.0, -0.5, 2.0], [0.2, 0.3, -1.0], [0.5, 0.0, 1.0]
    tensors = [torch.tensor(x, dtype=torch.float64) for x in (chosen, rejected, margin)]
    plain = statistics.fmean(minus_log_sigmoid(c - r) for c, r in zip(chosen, rejected, strict=True))
    shifted = statistics.fmean(minus_log_sigmoid(c - r - m) for c, r, m in zip(chosen, rejected, margin, strict=True))
    close(bradley_terry_loss(*tensors[:2]).loss, plain)
    close(bradley_terry_loss(*tensors[:2], margin=tensors[2]).loss, shifted)
    assert bradley_terry_loss(*tensors[:2]).metrics["reward_model/accuracy"][0].item() == pytest.approx(2 / 3)


def test_cost_model_adds_the_sign_of_each_response():
    worse, better = [1.0, -0.5, 2.0], [0.2, 0.3, -1.0]
    unsafe, also_unsafe = [True, True, False], [True, False, False]
    expected = []
    for w, b, sw, sb in zip(worse, better, unsafe, also_unsafe, strict=True):
        signs = minus_log_sigmoid(w if sw else -w) + minus_log_sigmoid(b if sb else -b)
        expected.append(minus_log_sigmoid(w - b) + signs)
    costs = [torch.tensor(x, dtype=torch.float64) for x in (worse, better)]
    found = cost_model_loss(*costs, torch.tensor(unsafe), torch.tensor(also_unsafe))
    close(found.loss, statistics.fmean(expected))
    assert found.metrics["cost_model/sign_accuracy"][0].item() == pytest.approx(3 / 6)
