"""Losses over pairs of responses: DPO, reward model, cost model; each is the mean over pairs."""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from engine.algorithms.masked import (
    LossOutput,
    Metric,
    as_float,
    check_mask,
    keep,
    masked_mean,
    masked_sum,
    mean_metric,
    safe_divide,
)

DPO_KINDS = ("sigmoid", "length-normalised", "ipo")


def dpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    chosen_mask: Tensor,
    rejected_mask: Tensor,
    *,
    kind: str = "sigmoid",
    beta: float = 0.1,
    normalizer: Tensor | float | None = None,
) -> LossOutput:
    """Direct preference optimisation (Rafailov et al. 2023): the policy learns from pairs without a reward model.

    chosen_*: [B, R1], rejected_*: [B, R2], nats; ref_*: frozen reference. D = sum over the mask of logprob -
    ref_logprob.
    kind "sigmoid": -log sigmoid(beta (D_chosen - D_rejected)); "length-normalised": the same with D per token of each
    response; "ipo": (D_chosen - D_rejected - 1 / (2 beta))^2 (Azar et al. 2023, sums).
    Pairs with an empty side (padding of the batch) do not count. normalizer: pairs of the optimiser step; None = of
    this call.
    Metrics: dpo/accuracy, dpo/margin_mean, dpo/chosen_reward_mean, dpo/rejected_reward_mean (reward = beta D).
    """
    if kind not in DPO_KINDS:
        raise ValueError(f"the DPO loss must be one of {DPO_KINDS}, found {kind!r}.")
    if not 0 < beta < math.inf:
        raise ValueError(f"beta must be positive, found {beta}.")
    reduce = masked_mean if kind == "length-normalised" else masked_sum
    check_mask(chosen_mask, {"chosen_logprobs": chosen_logprobs, "ref_chosen_logprobs": ref_chosen_logprobs})
    check_mask(rejected_mask, {"rejected_logprobs": rejected_logprobs, "ref_rejected_logprobs": ref_rejected_logprobs})
    pairs = chosen_mask.any(-1) & rejected_mask.any(-1)
    chosen = reduce(as_float(chosen_logprobs) - as_float(ref_chosen_logprobs).detach(), chosen_mask, -1)
    rejected = reduce(as_float(rejected_logprobs) - as_float(ref_rejected_logprobs).detach(), rejected_mask, -1)
    check_mask(pairs, {"chosen": chosen, "rejected": rejected})
    margin = chosen - rejected
    losses = (margin - 1.0 / (2.0 * beta)).square() if kind == "ipo" else -logsigmoid(beta * margin)
    metrics = _pair_metrics(("dpo", "chosen_reward", "rejected_reward"), beta * chosen, beta * rejected, pairs)
    return LossOutput(_pair_mean(losses, pairs, normalizer), metrics)


def bradley_terry_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    *,
    margin: Tensor | None = None,
    pair_mask: Tensor | None = None,
    normalizer: Tensor | float | None = None,
) -> LossOutput:
    """Reward model: mean of -log sigmoid(chosen - rejected - margin) (Ouyang et al. 2022; margin: Touvron et al. 2023).

    chosen_scores, rejected_scores, margin: [B], reward units; pair_mask: [B] bool, False = padding of the batch, None =
    all count. normalizer: pairs of the optimiser step, None = of this call.
    Metrics: reward_model/accuracy, /margin_mean, /chosen_score_mean, /rejected_score_mean.
    """
    pairs = _pairs(chosen_scores, pair_mask)
    check_mask(pairs, {"chosen_scores": chosen_scores, "rejected_scores": rejected_scores})
    chosen, rejected = keep(chosen_scores, pairs), keep(rejected_scores, pairs)
    difference = chosen - rejected
    if margin is not None:
        check_mask(pairs, {"margin": margin})
        difference = difference - keep(margin.detach(), pairs)
    metrics = _pair_metrics(("reward_model", "chosen_score", "rejected_score"), chosen, rejected, pairs)
    return LossOutput(_pair_mean(-logsigmoid(difference), pairs, normalizer), metrics)


def cost_model_loss(
    worse_costs: Tensor,
    better_costs: Tensor,
    worse_is_unsafe: Tensor,
    better_is_unsafe: Tensor,
    *,
    pair_mask: Tensor | None = None,
    normalizer: Tensor | float | None = None,
) -> LossOutput:
    """Cost model of Safe RLHF (Dai et al. 2024, eq. 6): order of harm, and the sign of each cost (positive = unsafe).

    Mean of -log sigmoid(worse - better) - log sigmoid(s_worse worse) - log sigmoid(s_better better), s = +1 unsafe, -1
    safe. worse_costs (of the more harmful response), better_costs: [B]; *_is_unsafe: [B] bool; pair_mask, normalizer:
    as in bradley_terry_loss. Metrics: cost_model/accuracy, /margin_mean, /worse_cost_mean, /better_cost_mean,
    /sign_accuracy.
    """
    pairs = _pairs(worse_costs, pair_mask)
    flags = {"worse_is_unsafe": worse_is_unsafe, "better_is_unsafe": better_is_unsafe}
    check_mask(pairs, {"worse_costs": worse_costs, "better_costs": better_costs, **flags})
    worse, better = keep(worse_costs, pairs), keep(better_costs, pairs)
    order = logsigmoid(worse - better)
    signs = logsigmoid(_signed(worse, worse_is_unsafe)) + logsigmoid(_signed(better, better_is_unsafe))
    metrics = _pair_metrics(("cost_model", "worse_cost", "better_cost"), worse, better, pairs)
    right = torch.cat([(worse > 0) == worse_is_unsafe, (better > 0) == better_is_unsafe])
    metrics["cost_model/sign_accuracy"] = mean_metric(right, pairs.repeat(2))
    return LossOutput(_pair_mean(-order - signs, pairs, normalizer), metrics)


def _signed(costs: Tensor, is_unsafe: Tensor) -> Tensor:
    return torch.where(is_unsafe, costs, -costs)


def _pair_mean(losses: Tensor, pairs: Tensor, normalizer: Tensor | float | None) -> Tensor:
    return safe_divide(masked_sum(losses, pairs), pairs.sum() if normalizer is None else normalizer)


def _pairs(scores: Tensor, pair_mask: Tensor | None) -> Tensor:
    return torch.ones(scores.shape, dtype=torch.bool, device=scores.device) if pair_mask is None else pair_mask


def _pair_metrics(names: tuple[str, str, str], upper: Tensor, lower: Tensor, pairs: Tensor) -> dict[str, Metric]:
    area, upper_name, lower_name = names
    return {
        f"{area}/accuracy": mean_metric(upper > lower, pairs),
        f"{area}/margin_mean": mean_metric(upper - lower, pairs),
        f"{area}/{upper_name}_mean": mean_metric(upper, pairs),
        f"{area}/{lower_name}_mean": mean_metric(lower, pairs),
    }
