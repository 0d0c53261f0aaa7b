"""CISPO (MiniMax-M1 2025): GRPO's advantage; importance weights are clipped, no token's gradient is dropped."""

from engine.algorithms.advantages import grpo
from engine.batch import Batch
from engine.config import RunConfig
from engine.dataflows.experience import measure
from engine.dataflows.grpo import make_experience as make_experience
from engine.dataflows.improvement import improve_policy
from engine.dataflows.roles import Learned, Progress, Roles


def learn(roles: Roles, batch: Batch, config: RunConfig, progress: Progress) -> Learned:
    """Training half: group-relative advantages; what is clipped is the surrogate's business."""
    batch, metrics = measure(batch, config)
    advantages = grpo(batch.scores, batch.group_ids, batch.response_mask)
    return improve_policy(roles, batch.with_fields(advantages=advantages), config, progress, metrics)
