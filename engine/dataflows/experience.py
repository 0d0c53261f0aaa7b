"""An experience made ready to learn from: described, and corrected for the gap between sampler and trainer."""

import torch

from engine.algorithms.correction import rejected_rows, rollout_weights
from engine.batch import Batch
from engine.config import RunConfig
from engine.dataflows.description import describe
from engine.errors import DivergedError
from engine.metrics import Metrics, from_pairs


def measure(batch: Batch, config: RunConfig) -> tuple[Batch, Metrics]:
    """The experience ready to learn from: corrected for the gap between sampler and trainer, and described."""
    metrics = describe(batch)
    batch, mismatch = correct(batch, config)
    return batch, metrics | mismatch


def correct(batch: Batch, config: RunConfig) -> tuple[Batch, Metrics]:
    """The batch with `rollout_weights` (all 1 without a correction) and the mismatch metrics, which are always on.

    Raises DivergedError where sampler and trainer disagree by more than algorithm.max_logprob_gap nats per token.
    """
    correction = config.algorithm.correction
    weights, pairs = rollout_weights(
        batch.old_logprobs,
        batch.rollout_logprobs,
        batch.response_mask,
        mode=correction.mode,
        cap=correction.cap,
        floor=correction.floor,
    )
    metrics = from_pairs(pairs)
    gap = metrics["rollout/logprob_gap_mean"]
    if batch.response_mask.any() and not gap <= config.algorithm.max_logprob_gap:  # NaN is no agreement
        raise DivergedError(
            f"Sampler and trainer differ by {gap:.3g} nats per token on the tokens just sampled; "
            f"algorithm.max_logprob_gap allows {config.algorithm.max_logprob_gap:g}.",
            remedy="The engine serves other weights, or samples in another way, than the trainer scores.",
        )
    rejected = rejected_rows(weights, batch.response_mask)
    scores = torch.where(rejected, torch.nan, batch.scores)  # a rejected sample leaves the baseline of its group too
    return batch.with_fields(rollout_weights=weights, scores=scores), metrics
