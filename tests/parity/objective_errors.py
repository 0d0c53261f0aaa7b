"""Error of the losses on fixed rows in float32 against their definitions in float64 lists."""

import math
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from engine.algorithms.losses import sft_loss
from engine.algorithms.preference import bradley_terry_loss, cost_model_loss, dpo_loss
from tests.parity.ragged import logprobs, masks, random, rows
from tests.parity.test_preference import CHOSEN_MASK, REJECTED_MASK, SIDES, dpo_pair, minus_log_sigmoid

BETA, PAIRS = 0.1, 64
EVERY_PAIR = torch.ones(1, PAIRS, dtype=torch.bool)
UPPER, LOWER = (random(EVERY_PAIR, seed)[0] for seed in (1, 2))


def sft() -> tuple[Tensor, float]:
    mask = masks()
    scored = logprobs(mask, 1)
    return sft_loss(scored.float(), mask).loss, -statistics.fmean(x for row in rows(scored, mask) for x in row)


def dpo() -> tuple[Tensor, float]:
    found = dpo_loss(*(side.float() for side in SIDES), CHOSEN_MASK, REJECTED_MASK, kind="sigmoid", beta=BETA).loss
    sides = [rows(x, m) for x, m in zip(SIDES, (CHOSEN_MASK, REJECTED_MASK) * 2, strict=True)]
    return found, statistics.fmean(dpo_pair("sigmoid", BETA, *pair) for pair in zip(*sides, strict=True) if all(pair))


def reward_model() -> tuple[Tensor, float]:
    pairs = zip(UPPER.tolist(), LOWER.tolist(), strict=True)
    expected = statistics.fmean(minus_log_sigmoid(upper - lower) for upper, lower in pairs)
    return bradley_terry_loss(UPPER.float(), LOWER.float()).loss, expected


def cost_model() -> tuple[Tensor, float]:
    unsafe = torch.arange(PAIRS) % 3 > 0
    terms = []
    for upper, lower, harms in zip(UPPER.tolist(), LOWER.tolist(), unsafe.tolist(), strict=True):
        signs = minus_log_sigmoid(upper if harms else -upper) + minus_log_sigmoid(-lower)
        terms.append(minus_log_sigmoid(upper - lower) + signs)
    found = cost_model_loss(UPPER.float(), LOWER.float(), unsafe, torch.zeros_like(unsafe)).loss
    return found, math.fsum(terms) / PAIRS


LOSSES: dict[str, Callable[[], tuple[Tensor, float]]] = {
    "sft": sft,
    "dpo": dpo,
    "reward_model": reward_model,
    "cost_model": cost_model,
}


def objective_error(name: str) -> float:
    """Error of the loss, relative to the loss (at least 1)."""
    found, expected = LOSSES[name]()
    return abs(found.item() - expected) / max(1.0, abs(expected))
