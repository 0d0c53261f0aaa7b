"""PPO with a critic (Schulman et al. 2017; Ouyang et al. 2022): token rewards, GAE, clipped updates."""

import torch

from engine.algorithms.advantages import gae
from engine.algorithms.kl import AdaptiveKL, kl_estimate, shape_rewards
from engine.algorithms.masked import masked_sum, masked_whiten, scored_mask
from engine.batch import Batch
from engine.config import PPOConfig, RunConfig
from engine.dataflows.denominators import denominators
from engine.dataflows.experience import correct, describe
from engine.dataflows.roles import Learned, Progress, Roles, with_mini_batches
from engine.metrics import Metrics
from engine.workers.critic import CriticWorker
from engine.workers.policy import LEARNS_FROM, PolicyWorker
from engine.workers.reference import ReferenceWorker
from engine.workers.reward import RewardWorker
from engine.workers.rollout import RolloutWorker


def make_experience(roles: Roles, prompts: Batch, config: RunConfig) -> Batch:
    """Rollout half of one iteration; the result is committed before anything learns from it."""
    batch = roles.rollout.call(RolloutWorker.generate, prompts.repeat(config.rollout.samples_per_prompt))
    old = roles.policy.submit(PolicyWorker.compute_logprobs, batch)
    values = roles.critic.submit(CriticWorker.compute_values, batch)
    scores = roles.reward.submit(RewardWorker.score, batch)
    if roles.reference is None:
        return batch.merge(old, values, scores)
    return batch.merge(old, values, scores, roles.reference.submit(ReferenceWorker.compute_logprobs, batch))


def learn(roles: Roles, batch: Batch, config: RunConfig, progress: Progress) -> Learned:
    """Training half: pure maths on the controller, then one update call per trained role."""
    algorithm = config.algorithm
    assert isinstance(algorithm, PPOConfig)
    metrics = describe(batch)
    batch, mismatch = correct(batch, config)
    token_rewards, kl, after = _shape(batch, config, progress)
    advantages, returns = gae(
        token_rewards,
        batch.values,
        batch.response_mask,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        bootstrap_values=batch.bootstrap_values,
    )
    learnt_from = scored_mask(batch.scores, batch.response_mask)
    batch = batch.with_fields(advantages=masked_whiten(advantages, learnt_from), returns=returns)
    batch = with_mini_batches(batch, config, progress.iteration)
    metrics = metrics | mismatch | kl
    critic = roles.critic.submit(CriticWorker.update, batch, denominators(batch, config, "token-mean"))
    if progress.iteration <= algorithm.critic_warmup:
        return Learned(metrics | critic.result(), after)
    policy = roles.policy.submit(
        PolicyWorker.update, batch.select(LEARNS_FROM), denominators(batch, config, algorithm.aggregation)
    )
    return Learned(metrics | critic.result() | policy.result(), after)


def _shape(batch: Batch, config: RunConfig, progress: Progress) -> tuple[torch.Tensor, Metrics, Progress]:
    """Token rewards [B, R] with the KL penalty, its metrics, and the coefficient of the next iteration."""
    algorithm = config.algorithm
    assert isinstance(algorithm, PPOConfig)
    if "ref_logprobs" not in batch:
        zeros = torch.zeros_like(batch.old_logprobs)
        return shape_rewards(batch.scores, zeros, zeros, batch.response_mask, 0.0), Metrics(), progress
    coefficient = progress.controllers.get("kl_coef", algorithm.kl_coef)
    rewards = shape_rewards(batch.scores, batch.old_logprobs, batch.ref_logprobs, batch.response_mask, coefficient)
    kl = masked_sum(kl_estimate(batch.old_logprobs, batch.ref_logprobs, "k1"), batch.response_mask) / len(batch)
    metrics = (
        Metrics().with_value("policy/ref_kl", float(kl), weight=len(batch)).with_value("policy/kl_coef", coefficient)
    )
    if algorithm.kl_target is None:
        return rewards, metrics, progress
    controller = AdaptiveKL(coefficient, algorithm.kl_target, algorithm.kl_horizon).updated(float(kl), len(batch))
    return rewards, metrics, progress.with_controller("kl_coef", controller.coef)
