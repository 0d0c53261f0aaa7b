"""What the gap between sampler and trainer does to the gradient, and the importance weights that repair it."""

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

MODES = ("none", "token", "icepop", "sequence", "geometric")


def rollout_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    *,
    mode: str,
    cap: float = 2.0,
    floor: float | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """Weights [B, R] for the token losses, detached, zero outside the mask; and the metrics of the gap, in every mode.

    old_logprobs (trainer), rollout_logprobs (sampler): [B, R], nats; w = exp(old - rollout), log bounded at +-20.
    mode "none": 1. "token": w cut to at most cap (Espeholt et al. 2018). "sequence": exp of the summed log ratio cut to
    at most cap, the same for all tokens of a row. "icepop": w inside [floor, cap], else 0. "geometric": 1 for rows
    whose exp(mean log ratio) lies inside [floor, cap], else the whole row 0.
    floor: the low side of the same bound; None leaves it open. It has no use in "none" and is refused there.
    With the proximal policy as old and the behaviour policy as rollout, "token" is the weight of decoupled PPO.
    Rows rejected whole also leave the baseline of their group: see rejected_rows.
    """
    _check(mode, cap, floor)
    check_mask(response_mask, {"old_logprobs": old_logprobs, "rollout_logprobs": rollout_logprobs})
    log_ratio = keep(old_logprobs.detach() - rollout_logprobs.detach(), response_mask)
    ratio = _bounded_exp(log_ratio)
    low = 0.0 if floor is None else floor
    if mode == "token":
        weights = ratio.clamp(low, cap)
    elif mode == "sequence":
        weights = _bounded_exp(masked_sum(log_ratio, response_mask, -1)).clamp(low, cap)[:, None].expand_as(ratio)
    elif mode == "icepop":
        weights = keep(ratio, (ratio >= low) & (ratio <= cap))
    elif mode == "geometric":
        mean_ratio = _bounded_exp(masked_mean(log_ratio, response_mask, -1))
        weights = ((mean_ratio >= low) & (mean_ratio <= cap)).to(ratio.dtype)[:, None].expand_as(ratio)
    else:
        weights = torch.ones_like(ratio)
    weights = keep(weights, response_mask)
    return weights, _gap_metrics(log_ratio, ratio, weights, response_mask)


def rejected_rows(weights: Tensor, response_mask: Tensor) -> Tensor:
    """Rows [B] bool with tokens but no weight left: set their score to NaN, so that the baseline loses them too."""
    check_mask(response_mask, {"weights": weights})
    return response_mask.any(-1) & ~(response_mask & (weights > 0)).any(-1)


def _check(mode: str, cap: float, floor: float | None) -> None:
    if mode not in MODES:
        raise ValueError(f"rollout correction mode must be one of {MODES}, found {mode!r}.")
    if floor is not None and mode == "none":
        raise ValueError(f"floor={floor} has no use in mode 'none'. Choose a mode or leave floor out.")
    low = 0.0 if floor is None else floor
    if not 0.0 <= low <= cap or cap <= 0.0:
        raise ValueError(f"rollout correction needs 0 <= floor <= cap and cap > 0, found floor={floor}, cap={cap}.")


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _gap_metrics(log_ratio: Tensor, ratio: Tensor, weights: Tensor, mask: Tensor) -> dict[str, Metric]:
    """All from the untouched ratio except the last two, which say what the correction did.

    ess_share: (sum w)^2 / (tokens * sum w^2), 1 = no gap. Its weighted mean over micro-batches is close, not exact;
    exact is weight_mean^2 / weight_square_mean. kl: estimates of KL(sampler || trainer).
    """
    count = mask.sum().to(ratio.dtype)
    weight_mean, weight_square_mean = masked_mean(ratio, mask), masked_mean(ratio * ratio, mask)
    bounded = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return {
        "rollout/logprob_gap_mean": mean_metric(log_ratio.abs(), mask),
        "rollout/logprob_gap_max": max_metric(log_ratio.abs(), mask),
        "rollout/kl_k1": mean_metric(-log_ratio, mask),
        "rollout/kl_k3": mean_metric((torch.expm1(bounded) - bounded).clamp(min=0.0), mask),
        "rollout/weight_mean": (weight_mean, count),
        "rollout/weight_square_mean": (weight_square_mean, count),
        "rollout/ess_share": (safe_divide(weight_mean * weight_mean, weight_square_mean), count),
        "rollout/applied_weight_mean": mean_metric(weights, mask),
        "rollout/rejected_frac": mean_metric(weights == 0.0, mask),
    }
