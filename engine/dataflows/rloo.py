"""RLOO (Ahmadian et al. 2024): the mean score of the other samples of a prompt is the baseline."""

from engine.algorithms.advantages import rloo
from engine.batch import Batch
from engine.config import RunConfig
from engine.dataflows.experience import measure
from engine.dataflows.grpo import make_experience as make_experience
from engine.dataflows.improvement import improve_policy
from engine.dataflows.roles import Learned, Progress, Roles


def learn(roles: Roles, batch: Batch, config: RunConfig, progress: Progress) -> Learned:
    """Training half: leave-one-out advantages, then one update call."""
    batch, metrics = measure(batch, config)
    advantages = rloo(batch.scores, batch.group_ids, batch.response_mask)
    return improve_policy(roles, batch.with_fields(advantages=advantages), config, progress, metrics)
