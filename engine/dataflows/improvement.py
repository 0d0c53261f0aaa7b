"""The last call of a critic-free iteration: the policy learns from advantages, in optimiser steps of equal size."""

from engine.algorithms.losses import loss_denominator
from engine.algorithms.masked import scored_mask
from engine.batch import Batch
from engine.config import RunConfig
from engine.dataflows.roles import Learned, Progress, Roles, with_mini_batches
from engine.metrics import Metrics
from engine.workers.policy import PolicyWorker, learns_from


def improve_policy(roles: Roles, batch: Batch, config: RunConfig, progress: Progress, metrics: Metrics) -> Learned:
    """One update call on a batch with `advantages` [B, R]; metrics: what was measured so far."""
    batch = with_mini_batches(without_unscored(batch), config, progress.iteration)
    normalizers = denominators(batch, config, config.algorithm.aggregation)
    policy = roles.policy.call(PolicyWorker.update, batch.select(learns_from(config)), normalizers)
    return Learned(metrics | policy, progress)


def without_unscored(batch: Batch) -> Batch:
    """The batch whose unscored samples are masked out, as padding is: they count in no denominator, and no loss, those of
    KL, entropy and value included, learns from them."""
    return batch.with_fields(response_mask=scored_mask(batch.scores, batch.response_mask))


def denominators(batch: Batch, config: RunConfig, aggregation: str) -> list[float]:
    """Loss denominator of every optimiser step, so that micro-batches and ranks add up.

    One number per mini-batch, in the unit of the aggregation mode (tokens, sequences, or sequences x longest).
    """
    return [
        float(
            loss_denominator(
                batch.response_mask[batch.mini_batch == number],
                aggregation,
                max_tokens=config.rollout.max_response_tokens,
            )
        )
        for number in range(config.train.mini_batches)
    ]
