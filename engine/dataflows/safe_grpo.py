"""Safe GRPO: group-normalised score and cost under the Lagrange multiplier of Safe RLHF (Dai et al. 2024), no critic."""

from engine.algorithms.advantages import grpo as group_relative
from engine.algorithms.lagrange import safe_advantages
from engine.batch import Batch
from engine.config import RunConfig, SafeGRPOConfig
from engine.dataflows import grpo
from engine.dataflows.constraint import scored_on_both_sides, update_multiplier
from engine.dataflows.experience import measure
from engine.dataflows.improvement import improve_policy
from engine.dataflows.roles import Learned, Progress, Roles
from engine.workers.cost import CostWorker
from engine.workers.reward import RewardWorker
from engine.workers.rollout import RolloutWorker


def make_experience(roles: Roles, prompts: Batch, config: RunConfig) -> Batch:
    """Rollout half: GRPO's, and what every response costs."""
    batch = roles.rollout.submit(RolloutWorker.generate, prompts.repeat(config.rollout.samples_per_prompt))
    scores = roles.reward.submit(RewardWorker.score, batch)
    costs = roles.cost.submit(CostWorker.score, batch)
    return grpo.assess(roles, batch, scores).merge(costs)


def learn(roles: Roles, batch: Batch, config: RunConfig, progress: Progress) -> Learned:
    """Training half: lambda follows the mean cost, both advantages are mixed, then one update call."""
    algorithm = config.algorithm
    assert isinstance(algorithm, SafeGRPOConfig)
    batch, metrics = measure(batch, config)
    batch = scored_on_both_sides(batch)
    multiplier, cost, after = update_multiplier(batch, algorithm, progress)
    helpful = group_relative(batch.scores, batch.group_ids, batch.response_mask)
    harmful = group_relative(batch.costs, batch.group_ids, batch.response_mask)
    advantages = safe_advantages(helpful, harmful, multiplier)
    return improve_policy(roles, batch.with_fields(advantages=advantages), config, after, metrics | cost)
