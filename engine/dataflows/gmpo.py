"""GMPO (Zhao et al. 2025): GRPO's advantage under the geometric mean of a response's clipped ratios."""

from engine.algorithms.advantages import grpo
from engine.batch import Batch
from engine.config import RunConfig
from engine.dataflows.experience import measure
from engine.dataflows.grpo import make_experience as make_experience
from engine.dataflows.improvement import improve_policy
from engine.dataflows.roles import Learned, Progress, Roles


def learn(roles: Roles, batch: Batch, config: RunConfig, progress: Progress) -> Learned:
    """Training half: group-relative advantages; the geometric mean is the surrogate's business."""
    batch, metrics = measure(batch, config)
    advantages = grpo(batch.scores, batch.group_ids, batch.response_mask)
    return improve_policy(roles, batch.with_fields(advantages=advantages), config, progress, metrics)
