"""GPG (Chu et al. 2025): the plain policy gradient, scaled up for the groups that taught nothing."""

from engine.algorithms.advantages import gpg
from engine.batch import Batch
from engine.config import RunConfig
from engine.dataflows.experience import measure
from engine.dataflows.grpo import make_experience as make_experience
from engine.dataflows.improvement import improve_policy
from engine.dataflows.roles import Learned, Progress, Roles


def learn(roles: Roles, batch: Batch, config: RunConfig, progress: Progress) -> Learned:
    """Training half: centred scores times batch over teaching samples, then one update call."""
    batch, metrics = measure(batch, config)
    advantages = gpg(batch.scores, batch.group_ids, batch.response_mask)
    return improve_policy(roles, batch.with_fields(advantages=advantages), config, progress, metrics)
