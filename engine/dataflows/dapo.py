"""DAPO (Yu et al. 2025): groups that teach nothing are drawn again, the clip is wider upwards, length has a price."""

import logging

import torch

from engine.algorithms.advantages import grpo, has_spread, overlong_penalty
from engine.batch import Batch, concat
from engine.config import DAPOConfig, RunConfig
from engine.dataflows.experience import measure
from engine.dataflows.improvement import improve_policy
from engine.dataflows.roles import Learned, Progress, Roles
from engine.errors import DivergedError
from engine.workers.policy import PolicyWorker
from engine.workers.reward import RewardWorker
from engine.workers.rollout import RolloutWorker

log = logging.getLogger(__name__)


def make_experience(roles: Roles, prompts: Batch, config: RunConfig) -> Batch:
    """Rollout half: prompts (those of every draw that is allowed) are used until there are enough groups with spread."""
    wanted, samples = config.train.prompts_per_iteration, config.rollout.samples_per_prompt
    kept: list[Batch] = []
    for draw, drawn in enumerate(prompts.split([wanted] * config.algorithm.rounds), start=1):
        generated = roles.rollout.submit(RolloutWorker.generate, drawn.repeat(samples))
        scores = roles.reward.submit(RewardWorker.score, generated)
        scored = generated.result().merge(scores)
        # A group that could not be scored stays, so that a scorer that is down does not look like prompts that are too hard.
        unscored = torch.isin(scored.group_ids, scored.group_ids[scored.scores.isnan()])
        teaches = torch.nonzero(has_spread(scored.scores, scored.group_ids) | unscored).flatten()
        kept.append(scored.index(teaches).with_fields(draws=torch.full_like(teaches, draw)))
        if sum(map(len, kept)) >= wanted * samples:
            break
    batch = concat(kept)
    batch = batch.index(torch.arange(min(len(batch), wanted * samples)))
    _require_enough(batch, config, len(kept))
    return batch.merge(roles.policy.submit(PolicyWorker.compute_logprobs, batch))


def learn(roles: Roles, batch: Batch, config: RunConfig, progress: Progress) -> Learned:
    """Training half: group-relative advantages of scores that pay for length, then one update call."""
    algorithm = config.algorithm
    assert isinstance(algorithm, DAPOConfig)
    batch, metrics = measure(batch, config)
    missing = config.train.prompts_per_iteration - len(batch) // config.rollout.samples_per_prompt
    metrics = metrics.with_value("rollout/draws_max", int(batch.draws.max()), "max")
    metrics = metrics.with_value("rollout/missing_groups", missing, "sum")
    scores = batch.scores
    if algorithm.overlong_buffer is not None:
        longest = config.rollout.max_response_tokens
        penalty = overlong_penalty(batch.response_lengths, max_tokens=longest, buffer=algorithm.overlong_buffer)
        metrics = metrics.with_value("reward/overlong_penalty_mean", float(penalty.mean()), weight=len(batch))
        scores = scores + penalty
    advantages = grpo(scores, batch.group_ids, batch.response_mask)
    return improve_policy(roles, batch.with_fields(advantages=advantages), config, progress, metrics)


def _require_enough(batch: Batch, config: RunConfig, draws: int) -> None:
    """Refills have a hard end. With fewer groups than planned the step is smaller; with too few there is none."""
    wanted, samples = config.train.prompts_per_iteration, config.rollout.samples_per_prompt
    found = f"{len(batch) // samples} of {wanted} groups have spread after {draws} draws of {wanted} prompts"
    if len(batch) < max(config.train.mini_batches, samples):
        raise DivergedError(
            f"Dynamic sampling stopped at its limit: {found}; all other prompts are always or never solved.",
            remedy="Use prompts of the right difficulty, more samples_per_prompt, or a higher algorithm.max_refills.",
        )
    if len(batch) < wanted * samples:
        log.warning("dynamic sampling stopped at its limit: %s; this step learns from those", found)
