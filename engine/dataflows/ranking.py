"""What is reported about held-out rows: how often pairs are ranked right, how sure the model is of it, likelihood."""

from typing import Any

import torch
from torch import Tensor


def ranking_report(upper: Tensor, lower: Tensor, *, bins: int) -> dict[str, Any]:
    """How well two scores tell the completions of a pair apart; upper, lower: [pairs], upper should be larger.

    {"rows", "unscored", "score_mean": share ranked right (a tie counts half), "margin_mean", "margin_std",
    "upper_mean", "lower_mean", "calibration_error": expected calibration error of sigmoid(margin) (Guo et al. 2017),
    "calibration": [{"from", "to", "pairs", "confidence", "accuracy"}], "margins": {"edges", "counts"}}.
    Pairs with a score that is no number are counted as unscored and left out.
    """
    known = torch.isfinite(upper) & torch.isfinite(lower)
    margins = (upper - lower)[known].double()
    report: dict[str, Any] = {"rows": len(upper), "unscored": int((~known).sum()), "score_mean": None}
    if len(margins) == 0:
        return report
    right = (margins > 0).double() + 0.5 * (margins == 0).double()
    error, table = calibration(margins, bins)
    return report | {
        "score_mean": float(right.mean()),
        "margin_mean": float(margins.mean()),
        "margin_std": float(margins.std()) if len(margins) > 1 else None,
        "upper_mean": float(upper[known].mean()),
        "lower_mean": float(lower[known].mean()),
        "calibration_error": error,
        "calibration": table,
        "margins": histogram(margins, bins),
    }


def calibration(margins: Tensor, bins: int) -> tuple[float, list[dict[str, Any]]]:
    """Expected calibration error, and confidence against accuracy in equal bins of the confidence, from 0.5 to 1.

    A pair's confidence is that of the order which the model prefers, sigmoid(|margin|); a tie is right by half.
    """
    confidence = torch.sigmoid(margins.abs())
    right = (margins > 0).double() + 0.5 * (margins == 0).double()
    numbers = ((confidence - 0.5) * 2 * bins).long().clamp(0, bins - 1)
    table, error = [], 0.0
    for number in range(bins):
        own = numbers == number
        count = int(own.sum())
        entry = {"from": 0.5 + number / (2 * bins), "to": 0.5 + (number + 1) / (2 * bins), "pairs": count}
        if count:
            entry |= {"confidence": float(confidence[own].mean()), "accuracy": float(right[own].mean())}
            error += count / len(margins) * abs(entry["confidence"] - entry["accuracy"])
        table.append(entry)
    return error, table


def histogram(margins: Tensor, bins: int) -> dict[str, list[float]]:
    """Counts of margins in equal bins from the smallest to the largest; edges has one entry more than counts."""
    low, high = float(margins.min()), float(margins.max())
    if low == high:
        low, high = low - 0.5, high + 0.5
    edges = torch.linspace(low, high, bins + 1, dtype=torch.float64)
    numbers = (torch.bucketize(margins, edges, right=True) - 1).clamp(0, bins - 1)
    return {"edges": edges.tolist(), "counts": torch.bincount(numbers, minlength=bins).tolist()}


def likelihood_report(logprobs: Tensor, mask: Tensor) -> dict[str, Any]:
    """{"rows", "unscored", "score_mean": mean log-likelihood per token, "nll", "tokens"}; logprobs, mask: [rows, R]."""
    tokens = int(mask.sum())
    total = float(logprobs.double()[mask].sum())
    return {
        "rows": len(mask),
        "unscored": 0,
        "score_mean": total / tokens,
        "nll": -total / tokens,
        "tokens": tokens,
    }
