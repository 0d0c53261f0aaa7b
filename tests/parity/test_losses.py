"""Policy, value and SFT losses against their definitions: plain floats, one token and one sequence at a time."""

import math
import statistics

import pytest
import torch
from torch.autograd import gradcheck

from engine.algorithms import losses
from tests.parity.ragged import close, logprobs, masks, random, rows

MASK = masks()
MAX_TOKENS = 11
OPTIONS = {
    "ppo": {"clip_low": 0.2, "clip_high": 0.28},
    "gspo": {"clip_low": 0.1, "clip_high": 0.15},
    "cispo": {"clip_high": 0.7},
    "gmpo": {"clip_low": 0.4, "clip_high": 0.3},
    "reinforce": {},
}


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def clipped_token(ratio: float, advantage: float, options: dict[str, float]) -> float:
    kept = clip(ratio, 1 - options["clip_low"], 1 + options["clip_high"])
    return -min(ratio * advantage, kept * advantage)


def ppo_row(new, old, advantage, options):
    return [clipped_token(math.exp(n - o), a, options) for n, o, a in zip(new, old, advantage, strict=True)]


def gspo_row(new, old, advantage, options):
    if not new:
        return []
    ratio = math.prod(math.exp(n - o) for n, o in zip(new, old, strict=True)) ** (1 / len(new))
    return [clipped_token(ratio, a, options) for a in advantage]


def cispo_row(new, old, advantage, options):
    return [
        -min(math.exp(n - o), 1 + options["clip_high"]) * a * n for n, o, a in zip(new, old, advantage, strict=True)
    ]


def gmpo_row(new, old, advantage, options):
    """prod |min(r A, clip(r) A)| ^ (1/n) with the sign of A back: the paper's objective; |A| is that of the row."""
    if not new:
        return []
    factors = []
    for n, o, a in zip(new, old, advantage, strict=True):
        ratio, sign = math.exp(n - o), math.copysign(1, a)
        kept = clip(ratio, math.exp(-options["clip_low"]), math.exp(options["clip_high"]))
        factors.append(abs(min(ratio * sign, kept * sign)))
    mean_ratio = math.prod(factors) ** (1 / len(factors))
    return [-a * mean_ratio for a in advantage]


def reinforce_row(new, old, advantage, options):
    return [-a * n for n, a in zip(new, advantage, strict=True)]


DEFINITIONS = {
    "ppo": ppo_row,
    "gspo": gspo_row,
    "cispo": cispo_row,
    "gmpo": gmpo_row,
    "reinforce": reinforce_row,
}


def combined(token_losses: list[list[float]], mode: str) -> float:
    """The three ways of the literature to make one number of ragged token losses."""
    filled = [row for row in token_losses if row]
    if mode == "token-mean":
        return statistics.fmean(x for row in filled for x in row)
    if mode == "sequence-mean":
        return statistics.fmean(statistics.fmean(row) for row in filled)
    return statistics.fmean(math.fsum(row) / MAX_TOKENS for row in filled)


def row_advantages() -> torch.Tensor:
    """One advantage per sequence, of both signs and sizes."""
    per_row = torch.tensor([1.3, -0.7, 0.4, -2.0, 0.0, 0.9], dtype=torch.float64)
    return torch.where(MASK, per_row[:, None].expand(MASK.shape), torch.nan)


@pytest.mark.parametrize("aggregation", losses.AGGREGATIONS)
@pytest.mark.parametrize("kind", losses.POLICY_LOSSES)
def test_policy_loss_equals_its_definition(kind, aggregation):
    new, old, advantage = logprobs(MASK, 1), logprobs(MASK, 2), row_advantages()
    found = losses.policy_loss(
        new, old, advantage, MASK, kind=kind, aggregation=aggregation, max_tokens=MAX_TOKENS, **OPTIONS[kind]
    )
    token_losses = [
        DEFINITIONS[kind](n, o, a, OPTIONS[kind])
        for n, o, a in zip(rows(new, MASK), rows(old, MASK), rows(advantage, MASK), strict=True)
    ]
    close(found.loss, combined(token_losses, aggregation))


@pytest.mark.parametrize("kind", ["ppo", "gmpo", "reinforce"])
def test_policy_gradient_equals_finite_differences(kind):
    new, old = logprobs(MASK, 1).requires_grad_(), logprobs(MASK, 2)

    def loss(x):
        options = OPTIONS[kind]
        return losses.policy_loss(
            x, old, row_advantages(), MASK, kind=kind, aggregation="sequence-mean", **options
        ).loss

    assert gradcheck(loss, (torch.where(MASK, new, 0.0).detach().requires_grad_(),))


def test_gspo_gradient_is_that_of_the_sequence_ratio():
    """The paper's objective differentiated as it stands, with the gradient through the mean of the log ratios."""
    old, advantage = logprobs(MASK, 2), row_advantages()
    new = torch.where(MASK, logprobs(MASK, 1), 0.0).requires_grad_()
    losses.policy_loss(
        new, old, advantage, MASK, kind="gspo", aggregation="sequence-mean", clip_low=0.3, clip_high=0.3
    ).loss.backward()
    again = new.detach().clone().requires_grad_()
    filled = [row for row in range(len(MASK)) if MASK[row].any()]
    objective = torch.zeros((), dtype=torch.float64)
    for row in filled:
        ratio = (again[row][MASK[row]] - old[row][MASK[row]]).mean().exp()
        a = advantage[row][MASK[row]][0]
        objective = objective + torch.minimum(ratio * a, ratio.clamp(0.7, 1.3) * a)
    (-objective / len(filled)).backward()
    close(new.grad, again.grad)
    assert 0 < (new.grad != 0).any(-1).sum() < len(filled)


def test_cispo_gradient_is_that_of_weighted_log_probs():
    old, advantage = logprobs(MASK, 2), random(MASK, 3)
    new = torch.where(MASK, logprobs(MASK, 1), 0.0).requires_grad_()
    losses.policy_loss(new, old, advantage, MASK, kind="cispo", clip_high=0.7).loss.backward()
    weight = torch.where(MASK, (new.detach() - old).exp().clamp(max=1.7) * advantage, 0.0)
    close(new.grad, -weight / MASK.sum())


def test_dual_clip_and_correction_weights():
    new, old, advantage, weights = logprobs(MASK, 1), logprobs(MASK, 2), random(MASK, 3), random(MASK, 4).abs()
    found = losses.policy_loss(new, old, advantage, MASK, dual_clip=1.5, weights=weights, **OPTIONS["ppo"])
    token_losses = []
    bounded = 0
    for n, o, a, w in zip(*(rows(x, MASK) for x in (new, old, advantage, weights)), strict=True):
        free = ppo_row(n, o, a, OPTIONS["ppo"])
        capped = [min(x, -1.5 * y) if y < 0 else x for x, y in zip(free, a, strict=True)]
        bounded += sum(x != y for x, y in zip(free, capped, strict=True))
        token_losses.append([x * y for x, y in zip(capped, w, strict=True)])
    close(found.loss, combined(token_losses, "token-mean"))
    assert bounded > 0
    share, weight = found.metrics["policy/dual_clip_frac"]
    assert (share * weight).round().item() == bounded


def test_policy_metrics_are_token_means():
    new, old, advantage = logprobs(MASK, 1), logprobs(MASK, 2), random(MASK, 3)
    metrics = losses.policy_loss(new, old, advantage, MASK, **OPTIONS["ppo"]).metrics
    triples = [
        triple
        for n, o, a in zip(rows(new, MASK), rows(old, MASK), rows(advantage, MASK), strict=True)
        for triple in zip(n, o, a, strict=True)
    ]
    ratios = [math.exp(n - o) for n, o, _ in triples]
    held = [(r > 1.28 and a > 0) or (r < 0.8 and a < 0) for r, (_, _, a) in zip(ratios, triples, strict=True)]
    expected = {
        "policy/approx_kl": statistics.fmean(r - 1 - math.log(r) for r in ratios),
        "policy/ratio_mean": statistics.fmean(ratios),
        "policy/clip_frac": statistics.fmean(held),
    }
    for name, mean in expected.items():
        value, weight = metrics[name]
        assert value.item() == pytest.approx(mean, rel=1e-6), name
        assert weight.item() == len(triples)
    assert 0 < sum(held) < len(held)
    assert metrics["policy/ratio_max"][0].item() == pytest.approx(max(ratios))


@pytest.mark.parametrize("limit", [None, 0.2])
def test_value_loss_equals_its_definition(limit):
    values, old, returns = random(MASK, 5), random(MASK, 6), random(MASK, 7)
    errors = []
    for v, o, r in zip(rows(values, MASK), rows(old, MASK), rows(returns, MASK), strict=True):
        free = [(x - z) ** 2 for x, z in zip(v, r, strict=True)]
        near = [clip(x, y - 0.2, y + 0.2) for x, y in zip(v, o, strict=True)]
        held = [(x - z) ** 2 for x, z in zip(near, r, strict=True)]
        errors.append([max(pair) for pair in zip(free, held, strict=True)] if limit else free)
    close(losses.value_loss(values, old, returns, MASK, clip=limit).loss, combined(errors, "token-mean"))
    inside = torch.where(MASK, values, 0.0).requires_grad_()
    assert gradcheck(lambda x: losses.value_loss(x, old, returns, MASK, clip=limit).loss, (inside,))


def test_entropy_and_sft_losses():
    entropy, scores = random(MASK, 8).abs(), logprobs(MASK, 9)
    assert losses.entropy_loss(entropy, MASK, aggregation="sequence-mean").loss.item() == pytest.approx(
        -combined(rows(entropy, MASK), "sequence-mean")
    )
    assert losses.sft_loss(scores, MASK).loss.item() == pytest.approx(-combined(rows(scores, MASK), "token-mean"))
