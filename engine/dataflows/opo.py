"""OPO (Hao et al. 2025): exactly on-policy, with the length-weighted mean score of a group as baseline."""

from engine.algorithms.advantages import opo
from engine.batch import Batch
from engine.config import RunConfig
from engine.dataflows.experience import measure
from engine.dataflows.grpo import make_experience as make_experience
from engine.dataflows.improvement import improve_policy
from engine.dataflows.roles import Learned, Progress, Roles


def learn(roles: Roles, batch: Batch, config: RunConfig, progress: Progress) -> Learned:
    """Training half: advantages to the baseline of least variance, then one update call of one step."""
    batch, metrics = measure(batch, config)
    advantages = opo(batch.scores, batch.group_ids, batch.response_mask)
    return improve_policy(roles, batch.with_fields(advantages=advantages), config, progress, metrics)
