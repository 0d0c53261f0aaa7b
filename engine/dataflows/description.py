"""What is measured on every experience, whatever the algorithm: scores, components, lengths, ends, entropy."""

import torch

from engine.algorithms.advantages import group_metrics
from engine.algorithms.masked import mean_metric
from engine.batch import Batch
from engine.metrics import Metrics, from_pairs


def describe(batch: Batch) -> Metrics:
    """Scores, as a whole and by component, lengths and ends of one experience."""
    scored = ~torch.isnan(batch.scores)
    count = int(scored.sum())
    scores = batch.scores[scored]
    lengths = batch.response_lengths.float()
    tokens = batch.response_mask
    metrics = from_pairs(group_metrics(batch.scores, batch.group_ids))
    # An estimate: log-probabilities of samples average to minus the entropy of what they were sampled from.
    entropy = mean_metric(-batch.old_logprobs, tokens)
    metrics = metrics | from_pairs({"policy/sample_entropy": entropy})
    metrics = metrics.with_value("reward/score_mean", float(scores.mean()) if count else float("nan"), weight=count)
    metrics = metrics.with_value("reward/score_std", float(scores.std()) if count > 1 else float("nan"), weight=count)
    metrics = metrics.with_value("reward/unscored_share", 1 - count / max(len(batch), 1), weight=len(batch))
    metrics = metrics | _components(batch)
    metrics = metrics.with_value("rollout/response_tokens_mean", float(lengths.mean()), weight=len(batch))
    metrics = metrics.with_value("rollout/response_tokens_max", float(lengths.max()), "max")
    metrics = metrics.with_value("rollout/tokens", float(lengths.sum()), "sum")
    metrics = metrics.with_value(
        "rollout/cut_share", float((batch.finish_reason == 1).float().mean()), weight=len(batch)
    )
    return metrics


def _components(batch: Batch) -> Metrics:
    """reward/NAME_mean (unweighted) and reward/NAME_unscored_share of every component, and cost/ of those of cost."""
    metrics = Metrics()
    for area, column in (("reward", "components"), ("cost", "cost_components")):
        rows: tuple[dict[str, float | None], ...] = batch.columns.get(column, ())
        for name in rows[0] if rows else ():
            scores = [score for row in rows if (score := row[name]) is not None]
            mean = sum(scores) / len(scores) if scores else float("nan")
            metrics = metrics.with_value(f"{area}/{name}_mean", mean, weight=len(scores))
            unscored = 1 - len(scores) / len(rows)
            metrics = metrics.with_value(f"{area}/{name}_unscored_share", unscored, weight=len(rows))
    return metrics
