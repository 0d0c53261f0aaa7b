"""GRPO (Shao et al. 2024): the mean score of a prompt's own samples is the baseline; no critic."""

from engine.algorithms.advantages import grpo
from engine.batch import Batch
from engine.config import GRPOConfig, RunConfig
from engine.controller.group import Pending
from engine.dataflows.experience import measure
from engine.dataflows.improvement import improve_policy
from engine.dataflows.roles import Learned, Progress, Roles
from engine.workers.policy import PolicyWorker
from engine.workers.reference import ReferenceWorker
from engine.workers.reward import RewardWorker
from engine.workers.rollout import RolloutWorker


def make_experience(roles: Roles, prompts: Batch, config: RunConfig) -> Batch:
    """Rollout half of one iteration; the result is committed before anything learns from it."""
    batch = roles.rollout.submit(RolloutWorker.generate, prompts.repeat(config.rollout.samples_per_prompt))
    return assess(roles, batch, roles.reward.submit(RewardWorker.score, batch))


def assess(roles: Roles, batch: Pending, scores: Pending) -> Batch:
    """The responses with their scores and what policy and reference think of them."""
    old = roles.policy.submit(PolicyWorker.compute_logprobs, batch)
    if roles.reference is None:
        return batch.result().merge(old, scores)
    return batch.result().merge(old, scores, roles.reference.submit(ReferenceWorker.compute_logprobs, batch))


def learn(roles: Roles, batch: Batch, config: RunConfig, progress: Progress) -> Learned:
    """Training half: group-relative advantages on the controller, then one update call."""
    algorithm = config.algorithm
    assert isinstance(algorithm, GRPOConfig)
    batch, metrics = measure(batch, config)
    advantages = grpo(batch.scores, batch.group_ids, batch.response_mask, scale=algorithm.scale)
    return improve_policy(roles, batch.with_fields(advantages=advantages), config, progress, metrics)
