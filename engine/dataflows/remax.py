"""ReMax (Li et al. 2024): the score of the greedy response to the same prompt is the baseline."""

from collections.abc import Sequence

import torch

from engine.algorithms.advantages import remax
from engine.batch import Batch
from engine.config import RunConfig
from engine.dataflows import grpo
from engine.dataflows.experience import measure
from engine.dataflows.improvement import improve_policy
from engine.dataflows.roles import Learned, Progress, Roles
from engine.workers.reward import RewardWorker
from engine.workers.rollout import RolloutWorker


def make_experience(roles: Roles, prompts: Batch, config: RunConfig) -> Batch:
    """Rollout half: GRPO's, and one greedy generation."""
    greedy = roles.rollout.submit(RolloutWorker.generate_greedy, prompts, config.rollout.max_response_tokens)
    baseline = roles.reward.submit(RewardWorker.score, greedy)
    batch, scored = grpo.make_experience(roles, prompts, config), baseline.result()
    # A sample whose baseline is missing teaches nothing: it counts as unscored, for the reason the baseline gives.
    missing = [
        {**own, **{f"greedy {name}": reason for name, reason in reasons.items()}}
        for own, reasons in zip(batch.column("unscored"), _repeated(scored.column("unscored"), config), strict=True)
    ]
    greedy_scores = scored.scores.repeat_interleave(config.rollout.samples_per_prompt)
    return batch.with_fields(greedy_scores=greedy_scores).with_columns(unscored=missing)


def learn(roles: Roles, batch: Batch, config: RunConfig, progress: Progress) -> Learned:
    """Training half: how much better than greedy, then one update call."""
    missing = batch.greedy_scores.isnan()  # nothing to compare with: the sample counts as unscored
    batch = batch.with_fields(scores=torch.where(missing, torch.nan, batch.scores))
    batch, metrics = measure(batch, config)
    greedy = batch.greedy_scores[~batch.greedy_scores.isnan()]
    metrics = metrics.with_value("reward/greedy_score_mean", float(greedy.mean()), weight=len(greedy))
    advantages = remax(batch.scores, batch.greedy_scores, batch.response_mask)
    return improve_policy(roles, batch.with_fields(advantages=advantages), config, progress, metrics)


def _repeated(values: Sequence[dict[str, str]], config: RunConfig) -> list[dict[str, str]]:
    return [value for value in values for _ in range(config.rollout.samples_per_prompt)]
