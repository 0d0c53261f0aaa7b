"""REINFORCE++ with baseline (Hu 2025): score minus group mean, whitened over the whole batch."""

from engine.algorithms.advantages import reinforce_plus_plus_baseline
from engine.batch import Batch
from engine.config import RunConfig
from engine.dataflows.experience import measure
from engine.dataflows.grpo import make_experience as make_experience
from engine.dataflows.improvement import improve_policy
from engine.dataflows.roles import Learned, Progress, Roles


def learn(roles: Roles, batch: Batch, config: RunConfig, progress: Progress) -> Learned:
    """Training half: whitened differences to the group mean, then one update call."""
    batch, metrics = measure(batch, config)
    advantages = reinforce_plus_plus_baseline(batch.scores, batch.group_ids, batch.response_mask)
    return improve_policy(roles, batch.with_fields(advantages=advantages), config, progress, metrics)
