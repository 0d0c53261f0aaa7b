"""Losses that train the policy and the critic. A loss is a sum over a stated denominator, so micro-batches add up.

Every loss masks before exp and division: what stands outside the mask (NaN included) reaches neither value nor
gradient, and empty rows, empty batches and R = 0 give loss 0 with gradient 0. Only the current log-probs, values or
entropies carry gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.algorithms.masked import (
    LOG_RATIO_LIMIT,
    Metric,
    check_mask,
    keep,
    masked_mean,
    masked_sum,
    max_metric,
    mean_metric,
    safe_divide,
)
from engine.algorithms.masked import LossOutput as LossOutput

AGGREGATIONS = ("token-mean", "sequence-mean", "fixed")


def loss_denominator(response_mask: Tensor, mode: str, *, max_tokens: int | None = None) -> Tensor:
    """What `aggregate` divides by, 0-dim int64; its sum over micro-batches and ranks is the normalizer of a step.

    "token-mean": True entries. "sequence-mean": rows with at least one True entry. "fixed": such rows times max_tokens
    (the largest response the run allows, not the padded width). Rows that are padding only count nowhere.
    """
    _check_aggregation(mode)
    check_mask(response_mask, {})
    if mode == "token-mean":
        return response_mask.sum()
    sequences = response_mask.any(-1).sum()
    if mode == "sequence-mean":
        return sequences
    if max_tokens is None:
        raise ValueError(
            "aggregation 'fixed' divides by the largest response: give max_tokens, or the normalizer itself."
        )
    return sequences * max_tokens


def aggregate(
    token_losses: Tensor,
    response_mask: Tensor,
    mode: str,
    *,
    normalizer: Tensor | float | None = None,
    max_tokens: int | None = None,
) -> Tensor:
    """One scalar from token losses [B, R]: the sum (of row means in "sequence-mean") over the denominator.

    mode: "token-mean", "sequence-mean" or "fixed" (see loss_denominator, which also says what max_tokens is for).
    normalizer: the denominator of the whole optimiser step, in the unit of loss_denominator; None = of this call.
    """
    _check_aggregation(mode)
    if normalizer is None:
        normalizer = loss_denominator(response_mask, mode, max_tokens=max_tokens)
    if mode == "sequence-mean":
        total = masked_mean(token_losses, response_mask, -1).sum()
    else:
        total = masked_sum(token_losses, response_mask)
    return safe_divide(total, normalizer)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    kind: str = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    aggregation: str = "token-mean",
    normalizer: Tensor | float | None = None,
    weights: Tensor | None = None,
    max_tokens: int | None = None,
) -> LossOutput:
    """Policy-gradient loss, to be minimised; r = exp(logprobs - old_logprobs).

    All tensors [B, R]; logprobs carries the gradient; advantages in reward units, already zero for unscored samples.
    log r is bounded at +-20 nats; a token beyond has no gradient in "ppo" and "gmpo".
    kind "ppo": max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) (Schulman et al. 2017); with dual_clip = c > 1 the
    loss of a token with A < 0 is at most -A c (Ye et al. 2020). "gspo": the same with the sequence ratio exp(mean log
    r) (Zheng et al. 2025). "cispo": -stopgrad(min(r, 1 + clip_high)) A logprobs, low side open, clip_low unused
    (MiniMax-M1, 2025). "gmpo": -A times the geometric mean of the token ratios clipped to e^-clip_low .. e^clip_high on
    the side that PPO clips (Zhao et al. 2025). "reinforce": -A logprobs, no ratio, no clip.
    weights: [B, R] rollout correction, multiplied into the token losses, not into the denominator.
    aggregation, normalizer, max_tokens: see aggregate.
    Metrics: policy/clip_frac (tokens whose gradient the clip changed), policy/dual_clip_frac (with dual_clip),
    policy/approx_kl (k3 of old against current, never negative), policy/ratio_mean, policy/ratio_max (token ratios for
    every kind).
    Raises ShapeError for tensors that do not fit, ValueError for options that do not.
    """
    _check_policy_options(kind, clip_low, clip_high, dual_clip)
    check_mask(response_mask, {"logprobs": logprobs, "old_logprobs": old_logprobs, "advantages": advantages})
    logprobs = keep(logprobs, response_mask)
    log_ratio = logprobs - keep(old_logprobs.detach(), response_mask)
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    terms = _Terms(logprobs, log_ratio, keep(advantages.detach(), response_mask), response_mask, clip_low, clip_high)
    token_losses, clipped = _SURROGATES[kind](terms)
    metrics = _ratio_metrics(log_ratio.detach(), response_mask)
    metrics["policy/clip_frac"] = mean_metric(clipped, response_mask)
    if dual_clip is not None:
        bound = -terms.advantages * dual_clip
        bounded = (terms.advantages < 0) & (token_losses > bound)
        token_losses = torch.where(bounded, bound, token_losses)
        metrics["policy/dual_clip_frac"] = mean_metric(bounded, response_mask)
    if weights is not None:
        check_mask(response_mask, {"weights": weights})
        token_losses = token_losses * keep(weights.detach(), response_mask)
    loss = aggregate(token_losses, response_mask, aggregation, normalizer=normalizer, max_tokens=max_tokens)
    return LossOutput(loss, metrics)


def entropy_loss(
    entropy: Tensor,
    response_mask: Tensor,
    *,
    aggregation: str = "token-mean",
    normalizer: Tensor | float | None = None,
    max_tokens: int | None = None,
) -> LossOutput:
    """Minus the aggregated token entropy [B, R] (nats): times a positive coefficient it keeps the policy exploring."""
    loss = -aggregate(entropy, response_mask, aggregation, normalizer=normalizer, max_tokens=max_tokens)
    return LossOutput(loss, {"policy/entropy": mean_metric(entropy, response_mask)})


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    clip: float | None = None,
    normalizer: Tensor | float | None = None,
) -> LossOutput:
    """Squared error of the critic, optionally clipped around the old values (PPO, Schulman et al. 2017, eq. 9).

    values, old_values, returns: [B, R], reward units; response_mask: [B, R] bool, without unscored rows
    (masked.scored_mask). Token mean of (V - R)^2, no factor 1/2; with clip the larger of it and (clip(V, V_old - clip,
    V_old + clip) - R)^2.
    normalizer: number of True entries in the whole optimiser step; None = of this call.
    Metrics: value/prediction_mean, value/return_mean, value/squared_error, value/clip_frac (tokens held by the clip).
    Raises ShapeError if the four tensors differ in shape, ValueError if clip is not positive.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"the value clip must be positive or None, found {clip}.")
    check_mask(response_mask, {"values": values, "old_values": old_values, "returns": returns})
    values, returns = keep(values, response_mask), keep(returns.detach(), response_mask)
    squared_error = (values - returns).square()
    losses, held = squared_error, torch.zeros_like(response_mask)
    if clip is not None:
        old_values = keep(old_values.detach(), response_mask)
        near_old = old_values + (values - old_values).clamp(-clip, clip)
        clipped_error = (near_old - returns).square()
        held = clipped_error > squared_error
        losses = torch.where(held, clipped_error, squared_error)
    metrics = {
        "value/prediction_mean": mean_metric(values, response_mask),
        "value/return_mean": mean_metric(returns, response_mask),
        "value/squared_error": mean_metric(squared_error, response_mask),
        "value/clip_frac": mean_metric(held, response_mask),
    }
    return LossOutput(aggregate(losses, response_mask, "token-mean", normalizer=normalizer), metrics)


def sft_loss(logprobs: Tensor, label_mask: Tensor, *, normalizer: Tensor | float | None = None) -> LossOutput:
    """Mean negative log-likelihood of the label tokens, nats; also the pretraining (ptx) term of Safe RLHF.

    logprobs: [B, T] of the target tokens; label_mask: [B, T] bool, True on completion tokens only.
    normalizer: label tokens of the whole optimiser step; None = of this call. Without any label token the loss is 0 and
    the weight of sft/nll is 0: there is nothing to report.
    """
    check_mask(label_mask, {"logprobs": logprobs})
    loss = aggregate(-logprobs, label_mask, "token-mean", normalizer=normalizer)
    return LossOutput(loss, {"sft/nll": mean_metric(-logprobs, label_mask)})


@dataclass(frozen=True)
class _Terms:
    """What a surrogate works on: masked [B, R] tensors, only the first two with gradient, and the clip range."""

    logprobs: Tensor
    log_ratio: Tensor
    advantages: Tensor
    mask: Tensor
    clip_low: float
    clip_high: float


def _clipped(ratio: Tensor, terms: _Terms) -> tuple[Tensor, Tensor]:
    free = -terms.advantages * ratio
    clipped = -terms.advantages * ratio.clamp(1.0 - terms.clip_low, 1.0 + terms.clip_high)
    return torch.maximum(free, clipped), clipped > free


def _ppo(terms: _Terms) -> tuple[Tensor, Tensor]:
    return _clipped(terms.log_ratio.exp(), terms)


def _gspo(terms: _Terms) -> tuple[Tensor, Tensor]:
    # The sequence ratio as a value, the token log-prob as its gradient: the paper's gradient for any weight per token.
    sequence = masked_mean(terms.log_ratio.detach(), terms.mask, -1)[:, None]
    return _clipped((sequence + (terms.logprobs - terms.logprobs.detach())).exp(), terms)


def _cispo(terms: _Terms) -> tuple[Tensor, Tensor]:
    ratio = terms.log_ratio.detach().exp()
    limit = 1.0 + terms.clip_high
    return -ratio.clamp(max=limit) * terms.advantages * terms.logprobs, ratio > limit


def _gmpo(terms: _Terms) -> tuple[Tensor, Tensor]:
    log_ratio = terms.log_ratio
    pessimistic = torch.where(
        terms.advantages >= 0, log_ratio.clamp(max=terms.clip_high), log_ratio.clamp(min=-terms.clip_low)
    )
    geometric_mean = masked_mean(pessimistic, terms.mask, -1)[:, None].exp()
    return -terms.advantages * geometric_mean, pessimistic != log_ratio


def _reinforce(terms: _Terms) -> tuple[Tensor, Tensor]:
    return -terms.advantages * terms.logprobs, torch.zeros_like(terms.mask)


_SURROGATES: dict[str, Callable[[_Terms], tuple[Tensor, Tensor]]] = {
    "ppo": _ppo,
    "gspo": _gspo,
    "cispo": _cispo,
    "gmpo": _gmpo,
    "reinforce": _reinforce,
}
POLICY_LOSSES = tuple(_SURROGATES)


def _check_aggregation(mode: str) -> None:
    if mode not in AGGREGATIONS:
        raise ValueError(f"aggregation must be one of {AGGREGATIONS}, found {mode!r}.")


def _check_policy_options(kind: str, clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    if kind not in _SURROGATES:
        raise ValueError(f"policy loss must be one of {POLICY_LOSSES}, found {kind!r}.")
    if not (clip_low >= 0 and clip_high >= 0):
        raise ValueError(f"clip_low and clip_high are distances from ratio 1, found {clip_low} and {clip_high}.")
    if dual_clip is not None and (kind != "ppo" or not dual_clip > 1.0):
        raise ValueError(f"dual_clip must be above 1 and belongs to 'ppo', found dual_clip={dual_clip} with {kind!r}.")


def _ratio_metrics(log_ratio: Tensor, mask: Tensor) -> dict[str, Metric]:
    ratio = log_ratio.exp()
    return {
        "policy/approx_kl": mean_metric((torch.expm1(log_ratio) - log_ratio).clamp(min=0.0), mask),
        "policy/ratio_mean": mean_metric(ratio, mask),
        "policy/ratio_max": max_metric(ratio, mask),
    }
