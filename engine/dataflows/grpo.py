"""GRPO (Shao et al. 2024): the mean score of a prompt's own samples is the baseline; no critic."""

from engine.algorithms.advantages import grpo
from engine.batch import Batch
from engine.config import GRPOConfig, RunConfig
from engine.dataflows.denominators import denominators
from engine.dataflows.experience import correct, describe
from engine.dataflows.roles import Learned, Progress, Roles, with_mini_batches
from engine.workers.policy import LEARNS_FROM, PolicyWorker
from engine.workers.reference import ReferenceWorker
from engine.workers.reward import RewardWorker
from engine.workers.rollout import RolloutWorker


def make_experience(roles: Roles, prompts: Batch, config: RunConfig) -> Batch:
    """Rollout half of one iteration; the result is committed before anything learns from it."""
    batch = roles.rollout.call(RolloutWorker.generate, prompts.repeat(config.rollout.samples_per_prompt))
    old = roles.policy.submit(PolicyWorker.compute_logprobs, batch)
    scores = roles.reward.submit(RewardWorker.score, batch)
    if roles.reference is None:
        return batch.merge(old, scores)
    return batch.merge(old, scores, roles.reference.submit(ReferenceWorker.compute_logprobs, batch))


def learn(roles: Roles, batch: Batch, config: RunConfig, progress: Progress) -> Learned:
    """Training half: group-relative advantages on the controller, then one update call."""
    algorithm = config.algorithm
    assert isinstance(algorithm, GRPOConfig)
    metrics = describe(batch)
    batch, mismatch = correct(batch, config)
    batch = batch.with_fields(
        advantages=grpo(batch.scores, batch.group_ids, batch.response_mask, scale=algorithm.scale)
    )
    batch = with_mini_batches(batch, config, progress.iteration)
    fields = LEARNS_FROM if roles.reference is None else (*LEARNS_FROM, "ref_logprobs")
    policy = roles.policy.call(
        PolicyWorker.update, batch.select(fields), denominators(batch, config, algorithm.aggregation)
    )
    return Learned(metrics | mismatch | policy, progress)
