"""PPO with a critic (Schulman et al. 2017; Ouyang et al. 2022): token rewards, GAE, clipped updates."""

from engine.algorithms.advantages import gae
from engine.algorithms.masked import masked_whiten
from engine.batch import Batch
from engine.config import PPOConfig, RunConfig
from engine.controller.group import Pending
from engine.dataflows.experience import measure
from engine.dataflows.improvement import denominators, without_unscored
from engine.dataflows.roles import Learned, Progress, Roles, with_mini_batches
from engine.dataflows.shaping import shape
from engine.workers.critic import CriticWorker
from engine.workers.policy import PolicyWorker, learns_from
from engine.workers.reference import ReferenceWorker
from engine.workers.reward import RewardWorker
from engine.workers.rollout import RolloutWorker


def make_experience(roles: Roles, prompts: Batch, config: RunConfig) -> Batch:
    """Rollout half of one iteration; the result is committed before anything learns from it."""
    batch = roles.rollout.submit(RolloutWorker.generate, prompts.repeat(config.rollout.samples_per_prompt))
    return assess(roles, batch, roles.reward.submit(RewardWorker.score, batch))


def assess(roles: Roles, batch: Pending, scores: Pending) -> Batch:
    """The responses with their scores and what policy, critic and reference think of them."""
    old = roles.policy.submit(PolicyWorker.compute_logprobs, batch)
    values = roles.critic.submit(CriticWorker.compute_values, batch)
    if roles.reference is None:
        return batch.result().merge(old, values, scores)
    return batch.result().merge(old, values, scores, roles.reference.submit(ReferenceWorker.compute_logprobs, batch))


def learn(roles: Roles, batch: Batch, config: RunConfig, progress: Progress) -> Learned:
    """Training half: pure maths on the controller, then one update call per trained role."""
    algorithm = config.algorithm
    assert isinstance(algorithm, PPOConfig)
    batch, metrics = measure(batch, config)
    token_rewards, kl, after = shape(batch, algorithm, progress)
    advantages, returns = gae(
        token_rewards,
        batch.values,
        batch.response_mask,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        bootstrap_values=batch.bootstrap_values,
    )
    batch = without_unscored(batch)
    batch = batch.with_fields(advantages=masked_whiten(advantages, batch.response_mask), returns=returns)
    batch = with_mini_batches(batch, config, progress.iteration)
    critic = roles.critic.submit(CriticWorker.update, batch, denominators(batch, config, "token-mean"))
    if progress.iteration <= algorithm.critic_warmup:
        return Learned(metrics | kl | critic.result(), after)
    normalizers = denominators(batch, config, algorithm.aggregation)
    policy = roles.policy.submit(PolicyWorker.update, batch.select(learns_from(config)), normalizers)
    return Learned(metrics | kl | critic.result() | policy.result(), after)
