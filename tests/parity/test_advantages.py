"""Advantage estimators against their definitions, written with lists and double sums, one sample at a time."""

import math
import statistics

import pytest
import torch

from engine.algorithms import advantages
from tests.parity.ragged import close, masks, padded, random, rows

NAN = math.nan
# Groups are mixed up on purpose; group 9 has no spread, group 5 has one scored sample, group 2 has none.
IDS = [7, 9, 7, 3, 9, 3, 7, 3, 5, 2, 5, 7]
SCORES = [1.0, 0.5, -0.3, 2.0, 0.5, NAN, 0.7, -1.5, 4.0, NAN, math.inf, NAN]
LENGTHS = (5, 1, 2, 7, 3, 6, 4, 8, 2, 3, 1, 5)


def scored_siblings(index: int) -> list[int]:
    return [j for j, group in enumerate(IDS) if group == IDS[index] and math.isfinite(SCORES[j])]


def per_sample(formula) -> list[float]:
    """formula(index, scored indices of its group) where the group has spread and the sample a score, else 0."""
    result = []
    for index, score in enumerate(SCORES):
        members = scored_siblings(index)
        spread = len({SCORES[j] for j in members}) > 1
        result.append(formula(index, members) if math.isfinite(score) and spread else 0.0)
    return result


def group_mean(members: list[int]) -> float:
    return statistics.fmean(SCORES[j] for j in members)


def token_counts() -> list[int]:
    return masks(LENGTHS).sum(-1).tolist()


def whiten(values: list[list[float]], counted: list[bool]) -> list[list[float]]:
    everything = [x for row, counts in zip(values, counted, strict=True) if counts for x in row]
    mean, std = statistics.fmean(everything), math.sqrt(statistics.variance(everything) + 1e-8)
    return [[(x - mean) / std if counts else 0.0 for x in row] for row, counts in zip(values, counted, strict=True)]


def grpo_definition(index: int, members: list[int]) -> float:
    return (SCORES[index] - group_mean(members)) / (statistics.stdev(SCORES[j] for j in members) + 1e-6)


def rloo_definition(index: int, members: list[int]) -> float:
    return SCORES[index] - statistics.fmean(SCORES[j] for j in members if j != index)


def opo_definition(index: int, members: list[int]) -> float:
    lengths = token_counts()
    return SCORES[index] - sum(lengths[j] * SCORES[j] for j in members) / sum(lengths[j] for j in members)


def gpg_definition(index: int, members: list[int]) -> float:
    learning = sum(1 for j in range(len(SCORES)) if math.isfinite(SCORES[j]) and IDS[j] in (7, 3))
    return len(SCORES) / learning * (SCORES[index] - group_mean(members))


GROUP_ESTIMATORS = [
    pytest.param(advantages.grpo, {}, grpo_definition, id="grpo"),
    pytest.param(advantages.grpo, {"scale": "none"}, lambda i, m: SCORES[i] - group_mean(m), id="dr_grpo"),
    pytest.param(advantages.rloo, {}, rloo_definition, id="rloo"),
    pytest.param(advantages.opo, {}, opo_definition, id="opo"),
    pytest.param(advantages.gpg, {}, gpg_definition, id="gpg"),
]


@pytest.mark.parametrize(("estimator", "options", "definition"), GROUP_ESTIMATORS)
def test_group_estimator_equals_its_definition(estimator, options, definition):
    mask = masks(LENGTHS)
    found = estimator(torch.tensor(SCORES, dtype=torch.float64), torch.tensor(IDS), mask, **options)
    expected = padded([[a] * n for a, n in zip(per_sample(definition), token_counts(), strict=True)], mask)
    close(found, expected)
    assert found.abs().sum() > 1


def test_reinforce_plus_plus_baseline_whitens_the_tokens_of_scored_rows():
    mask = masks(LENGTHS)
    found = advantages.reinforce_plus_plus_baseline(torch.tensor(SCORES, dtype=torch.float64), torch.tensor(IDS), mask)
    centred = per_sample(lambda i, members: SCORES[i] - group_mean(members))
    token_values = [[a] * n for a, n in zip(centred, token_counts(), strict=True)]
    close(found, padded(whiten(token_values, [math.isfinite(s) for s in SCORES]), mask))


def test_remax_subtracts_the_greedy_score():
    mask = masks(LENGTHS)
    greedy = [0.25 * index if index != 3 else NAN for index in range(len(SCORES))]
    found = advantages.remax(torch.tensor(SCORES, dtype=torch.float64), torch.tensor(greedy, dtype=torch.float64), mask)
    expected = [s - g if math.isfinite(s) and math.isfinite(g) else 0.0 for s, g in zip(SCORES, greedy, strict=True)]
    close(found, padded([[a] * n for a, n in zip(expected, token_counts(), strict=True)], mask))


def n_step_return(rewards: list[float], values: list[float], start: int, steps: int, gamma: float) -> float:
    """Discounted rewards of `steps` tokens plus the discounted value after them; values has one entry more."""
    rewarded = sum(gamma**k * rewards[start + k] for k in range(steps))
    return rewarded + gamma**steps * values[start + steps]


def lambda_advantage(rewards: list[float], values: list[float], t: int, gamma: float, lam: float) -> float:
    """The lambda-weighted mean of all n-step returns, minus the value: GAE without its recursion."""
    left = len(rewards) - t
    weights = [(1 - lam) * lam ** (n - 1) for n in range(1, left)] + [lam ** (left - 1)]
    returns = [n_step_return(rewards, values, t, n, gamma) for n in range(1, left + 1)]
    return sum(w * g for w, g in zip(weights, returns, strict=True)) - values[t]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (0.99, 1.0), (0.7, 0.0)])
def test_gae_is_the_weighted_mean_of_n_step_returns(gamma, lam):
    mask = masks()
    token_rewards, values = random(mask, 1), random(mask, 2)
    bootstrap = [0.8, NAN, 0.5, -0.4, NAN, 0.0]
    found, returns = advantages.gae(
        token_rewards, values, mask, gamma=gamma, lam=lam, bootstrap_values=torch.tensor(bootstrap)
    )
    expected = []
    for row_rewards, row_values, after in zip(rows(token_rewards, mask), rows(values, mask), bootstrap, strict=True):
        with_end = [*row_values, 0.0 if math.isnan(after) else torch.tensor(after).item()]
        expected.append([lambda_advantage(row_rewards, with_end, t, gamma, lam) for t in range(len(row_rewards))])
    close(found, padded(expected, mask))
    close(returns, padded(expected, mask) + torch.where(mask, values, 0.0))


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_whitens_the_reward_to_go(gamma):
    mask = masks()
    token_rewards = random(mask, 3)
    token_rewards[3, 6] = NAN  # the last token of the row with a hole: an unscored sample
    to_go = [
        [sum(gamma ** (k - t) * row[k] for k in range(t, len(row))) for t in range(len(row))]
        for row in rows(token_rewards, mask)
    ]
    expected = whiten(to_go, [row != 3 for row in range(len(to_go))])
    close(advantages.reinforce_plus_plus(token_rewards, mask, gamma=gamma), padded(expected, mask))
