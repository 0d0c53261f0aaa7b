"""What is measured on every experience, whatever the algorithm, and the correction of sampler against trainer."""

import torch

from engine.algorithms.advantages import group_metrics
from engine.algorithms.correction import rejected_rows, rollout_weights
from engine.batch import Batch
from engine.config import RunConfig
from engine.errors import DivergedError
from engine.metrics import Metrics, from_pairs


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
    if gap > config.algorithm.max_logprob_gap:
        raise DivergedError(
            f"Sampler and trainer differ by {gap:.3g} nats per token on the tokens just sampled; "
            f"algorithm.max_logprob_gap allows {config.algorithm.max_logprob_gap:g}.",
            remedy="The engine serves other weights, or samples in another way, than the trainer scores.",
        )
    rejected = rejected_rows(weights, batch.response_mask)
    scores = torch.where(rejected, torch.nan, batch.scores)  # a rejected sample leaves the baseline of its group too
    return batch.with_fields(rollout_weights=weights, scores=scores), metrics


def describe(batch: Batch) -> Metrics:
    """Scores, lengths and ends of one experience."""
    scored = ~torch.isnan(batch.scores)
    count = int(scored.sum())
    scores = batch.scores[scored]
    lengths = batch.response_lengths.float()
    metrics = from_pairs(group_metrics(batch.scores, batch.group_ids))
    metrics = metrics.with_value("reward/score_mean", float(scores.mean()) if count else float("nan"), weight=count)
    metrics = metrics.with_value("reward/score_std", float(scores.std()) if count > 1 else float("nan"), weight=count)
    metrics = metrics.with_value("reward/unscored_share", 1 - count / max(len(batch), 1), weight=len(batch))
    metrics = metrics.with_value("rollout/response_tokens_mean", float(lengths.mean()), weight=len(batch))
    metrics = metrics.with_value("rollout/response_tokens_max", float(lengths.max()), "max")
    metrics = metrics.with_value("rollout/tokens", float(lengths.sum()), "sum")
    metrics = metrics.with_value(
        "rollout/cut_share", float((batch.finish_reason == 1).float().mean()), weight=len(batch)
    )
    return metrics
