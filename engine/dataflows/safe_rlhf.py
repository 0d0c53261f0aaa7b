"""Safe RLHF (Dai et al. 2024): PPO with a second critic for cost, and a multiplier that holds the mean cost at its limit."""

from engine.algorithms.advantages import gae
from engine.algorithms.lagrange import safe_advantages
from engine.algorithms.masked import masked_whiten
from engine.batch import Batch
from engine.config import RunConfig, SafeRLHFConfig
from engine.dataflows import ppo
from engine.dataflows.constraint import scored_on_both_sides, update_multiplier
from engine.dataflows.experience import measure
from engine.dataflows.improvement import denominators, without_unscored
from engine.dataflows.roles import Learned, Progress, Roles, with_mini_batches
from engine.dataflows.shaping import outcome_rewards, shape
from engine.workers.cost import CostCriticWorker, CostWorker
from engine.workers.critic import CriticWorker
from engine.workers.policy import PolicyWorker, learns_from
from engine.workers.reward import RewardWorker
from engine.workers.rollout import RolloutWorker


def make_experience(roles: Roles, prompts: Batch, config: RunConfig) -> Batch:
    """Rollout half: PPO's, and what every response costs and was expected to cost."""
    batch = roles.rollout.submit(RolloutWorker.generate, prompts.repeat(config.rollout.samples_per_prompt))
    scores = roles.reward.submit(RewardWorker.score, batch)
    costs = roles.cost.submit(CostWorker.score, batch)
    cost_values = roles.cost_critic.submit(CostCriticWorker.compute_values, batch)
    return ppo.assess(roles, batch, scores).merge(costs, cost_values)


def learn(roles: Roles, batch: Batch, config: RunConfig, progress: Progress) -> Learned:
    """Training half: lambda follows the mean cost; both critics and the policy learn."""
    algorithm = config.algorithm
    assert isinstance(algorithm, SafeRLHFConfig)
    batch, metrics = measure(batch, config)
    batch = scored_on_both_sides(batch)
    multiplier, cost, after = update_multiplier(batch, algorithm, progress)
    token_rewards, kl, after = shape(batch, algorithm, after)
    token_costs = outcome_rewards(batch.costs, batch.response_mask)
    mask, discount = batch.response_mask, {"gamma": algorithm.gamma, "lam": algorithm.lam}
    helpful, returns = gae(token_rewards, batch.values, mask, **discount, bootstrap_values=batch.bootstrap_values)
    harmful, cost_returns = gae(
        token_costs, batch.cost_values, mask, **discount, bootstrap_values=batch.cost_bootstrap_values
    )
    batch = without_unscored(batch)
    advantages = masked_whiten(safe_advantages(helpful, harmful, multiplier), batch.response_mask)
    batch = batch.with_fields(advantages=advantages, returns=returns, cost_returns=cost_returns)
    batch, metrics = with_mini_batches(batch, config, progress.iteration), metrics | cost | kl
    tokens = denominators(batch, config, "token-mean")
    critic = roles.critic.submit(CriticWorker.update, batch, tokens)
    cost_critic = roles.cost_critic.submit(CostCriticWorker.update, batch, tokens)
    if progress.iteration <= algorithm.critic_warmup:
        return Learned(metrics | critic.result() | cost_critic.result(), after)
    normalizers = denominators(batch, config, algorithm.aggregation)
    experience = batch.select(learns_from(config))
    if progress.demonstrations is None:
        policy = roles.policy.submit(PolicyWorker.update, experience, normalizers)
    else:
        shown = progress.demonstrations
        ptx = denominators(shown, config, "token-mean")
        policy = roles.policy.submit(PolicyWorker.update_with_demonstrations, experience, normalizers, shown, ptx)
    return Learned(metrics | critic.result() | cost_critic.result() | policy.result(), after)
