"""REINFORCE++ (Hu 2025): PPO's clipped update without a critic; rewards to go, whitened over the whole batch."""

from engine.algorithms.advantages import reinforce_plus_plus
from engine.batch import Batch
from engine.config import ReinforcePlusPlusConfig, RunConfig
from engine.dataflows.experience import measure
from engine.dataflows.grpo import make_experience as make_experience
from engine.dataflows.improvement import improve_policy
from engine.dataflows.roles import Learned, Progress, Roles
from engine.dataflows.shaping import shape


def learn(roles: Roles, batch: Batch, config: RunConfig, progress: Progress) -> Learned:
    """Training half: token rewards with the KL penalty inside, whitened to-go sums, then one update call."""
    algorithm = config.algorithm
    assert isinstance(algorithm, ReinforcePlusPlusConfig)
    batch, metrics = measure(batch, config)
    token_rewards, kl, after = shape(batch, algorithm, progress)
    advantages = reinforce_plus_plus(token_rewards, batch.response_mask, gamma=algorithm.gamma)
    return improve_policy(roles, batch.with_fields(advantages=advantages), config, after, metrics | kl)
