"""Token rewards: the score at the last token, and a penalty for every step away from the start policy."""

import torch

from engine.algorithms.kl import AdaptiveKL, kl_estimate, shape_rewards
from engine.algorithms.masked import masked_sum
from engine.batch import Batch
from engine.config import KLRewardConfig
from engine.dataflows.roles import Progress
from engine.metrics import Metrics


def shape(batch: Batch, options: KLRewardConfig, progress: Progress) -> tuple[torch.Tensor, Metrics, Progress]:
    """Token rewards [B, R] with the KL penalty, its metrics, and the coefficient of the next iteration."""
    if "ref_logprobs" not in batch:
        return outcome_rewards(batch.scores, batch.response_mask), Metrics(), progress
    coefficient = progress.controllers.get("kl_coef", options.kl_coef)
    rewards = shape_rewards(batch.scores, batch.old_logprobs, batch.ref_logprobs, batch.response_mask, coefficient)
    kl = masked_sum(kl_estimate(batch.old_logprobs, batch.ref_logprobs, "k1"), batch.response_mask) / len(batch)
    metrics = Metrics().with_value("policy/ref_kl", float(kl), weight=len(batch))
    metrics = metrics.with_value("policy/kl_coef", coefficient)
    if options.kl_target is None:
        return rewards, metrics, progress
    controller = AdaptiveKL(coefficient, options.kl_target, options.kl_horizon).updated(float(kl), len(batch))
    return rewards, metrics, progress.with_controller("kl_coef", controller.coef)


def outcome_rewards(scores: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Token rewards [B, R] without any penalty: scores [B] at the last response tokens."""
    zeros = torch.zeros(response_mask.shape)
    return shape_rewards(scores, zeros, zeros, response_mask, 0.0)
