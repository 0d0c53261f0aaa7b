"""Error of every algorithm in float32, from scores to the loss, against its definition in float64 lists."""

import math
from collections.abc import Callable
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from engine.algorithms import advantages, lagrange, losses, masked
from engine.config import AlgorithmConfig, OnlineConfig
from tests.parity import test_advantages as by_hand
from tests.parity.ragged import masks, padded, random, rows
from tests.parity.test_advantages import IDS, LENGTHS, SCORES
from tests.parity.test_losses import DEFINITIONS, MAX_TOKENS, combined

MASK = masks(LENGTHS)
GREEDY = [0.25 * index for index in range(len(SCORES))]
COSTS = [-0.5, 0.2, 1.5, -1.0, 0.1, 0.3, -0.2, 0.9, 0.0, 0.4, 0.6, -0.7]
MULTIPLIER, GAMMA, LAM = 0.8, 1.0, 0.95
Values = list[list[float]]  # one list per row, one number per token


def float32(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def over_tokens(per_row: list[float]) -> Values:
    return [[value] * count for value, count in zip(per_row, by_hand.token_counts(), strict=True)]


def grouped(estimator: Callable[..., Tensor], definition: Any, **options: Any) -> Callable[[], tuple[Tensor, Values]]:
    """An estimator that reads scores and groups, with its definition."""
    return lambda: (
        estimator(float32(SCORES), torch.tensor(IDS), MASK, **options),
        over_tokens(by_hand.per_sample(definition)),
    )


def remax() -> tuple[Tensor, Values]:
    known = [s - g if math.isfinite(s) else 0.0 for s, g in zip(SCORES, GREEDY, strict=True)]
    return advantages.remax(float32(SCORES), float32(GREEDY), MASK), over_tokens(known)


def reinforce_plus_plus() -> tuple[Tensor, Values]:
    rewards = random(MASK, 3)
    to_go = [[math.fsum(row[t:]) for t in range(len(row))] for row in rows(rewards, MASK)]
    return advantages.reinforce_plus_plus(rewards.float(), MASK), by_hand.whiten(to_go, [True] * len(to_go))


def reinforce_plus_plus_baseline() -> tuple[Tensor, Values]:
    centred = over_tokens(by_hand.per_sample(lambda i, members: SCORES[i] - by_hand.group_mean(members)))
    scored = [math.isfinite(score) for score in SCORES]
    found = advantages.reinforce_plus_plus_baseline(float32(SCORES), torch.tensor(IDS), MASK)
    return found, by_hand.whiten(centred, scored)


def gae_by_hand(rewards: Tensor, values: Tensor) -> Values:
    pairs = zip(rows(rewards, MASK), rows(values, MASK), strict=True)
    return [
        [by_hand.lambda_advantage(reward, [*value, 0.0], t, GAMMA, LAM) for t in range(len(reward))]
        for reward, value in pairs
    ]


def ppo() -> tuple[Tensor, Values]:
    rewards, values = random(MASK, 1), random(MASK, 2)
    found, _ = advantages.gae(rewards.float(), values.float(), MASK, gamma=GAMMA, lam=LAM)
    return masked.masked_whiten(found, MASK), by_hand.whiten(gae_by_hand(rewards, values), [True] * len(MASK))


def mixed(helpful: Values, harmful: Values) -> Values:
    return [
        [(h - MULTIPLIER * c) / (1 + MULTIPLIER) for h, c in zip(one, other, strict=True)]
        for one, other in zip(helpful, harmful, strict=True)
    ]


def safe_rlhf() -> tuple[Tensor, Values]:
    parts = [(random(MASK, seed), random(MASK, seed + 1)) for seed in (1, 4)]
    found = [advantages.gae(r.float(), v.float(), MASK, gamma=GAMMA, lam=LAM)[0] for r, v in parts]
    mix = masked.masked_whiten(lagrange.safe_advantages(found[0], found[1], MULTIPLIER), MASK)
    by_lists = mixed(*(gae_by_hand(r, v) for r, v in parts))
    return mix, by_hand.whiten(by_lists, [True] * len(MASK))


def safe_grpo() -> tuple[Tensor, Values]:
    scored = [math.isfinite(score) for score in SCORES]
    costs = [cost if known else math.nan for cost, known in zip(COSTS, scored, strict=True)]
    ids = torch.tensor(IDS)
    found = [advantages.grpo(float32(values), ids, MASK) for values in (SCORES, costs)]
    helpful, harmful = (over_tokens(_group_relative(values)) for values in (SCORES, costs))
    return lagrange.safe_advantages(found[0], found[1], MULTIPLIER), mixed(helpful, harmful)


def _group_relative(values: list[float]) -> list[float]:
    result = []
    for index, value in enumerate(values):
        members = [values[j] for j, group in enumerate(IDS) if group == IDS[index] and math.isfinite(values[j])]
        if not math.isfinite(value) or len(set(members)) < 2:
            result.append(0.0)
            continue
        mean = math.fsum(members) / len(members)
        spread = math.sqrt(math.fsum((one - mean) ** 2 for one in members) / (len(members) - 1))
        result.append((value - mean) / (spread + 1e-6))
    return result


GRPO = grouped(advantages.grpo, by_hand.grpo_definition)
ADVANTAGES: dict[str, Callable[[], tuple[Tensor, Values]]] = {
    "ppo": ppo,
    "grpo": GRPO,
    "dr_grpo": grouped(advantages.grpo, lambda i, m: SCORES[i] - by_hand.group_mean(m), scale="none"),
    "rloo": grouped(advantages.rloo, by_hand.rloo_definition),
    "remax": remax,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "opo": grouped(advantages.opo, by_hand.opo_definition),
    "gpg": grouped(advantages.gpg, by_hand.gpg_definition),
    "dapo": GRPO,
    "gspo": GRPO,
    "cispo": GRPO,
    "gmpo": GRPO,
    "safe_rlhf": safe_rlhf,
    "safe_grpo": safe_grpo,
}


def float32_error(name: str) -> float:
    """Largest error of advantages and loss, relative to the largest advantage (at least 1), with default options."""
    algorithm: OnlineConfig = TypeAdapter(AlgorithmConfig).validate_python({"name": name})
    found, expected = ADVANTAGES[name]()
    new, old = (random(MASK, seed, scale=0.3) - 1.5 for seed in (7, 8))
    options = algorithm.policy_loss_options
    loss = losses.policy_loss(new.float(), old.float(), found, MASK, max_tokens=MAX_TOKENS, **options).loss
    triples = zip(rows(new, MASK), rows(old, MASK), expected, strict=True)
    by_lists = combined([DEFINITIONS[options["kind"]](n, o, a, options) for n, o, a in triples], options["aggregation"])
    reference = padded(expected, MASK)
    scale = max(1.0, float(reference.abs().max()))
    return max(float((found.double() - reference).abs().max()), abs(loss.item() - by_lists)) / scale
