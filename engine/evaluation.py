"""Evaluation of one suite: greedy answers, scored by the run's reward; what could not be scored is counted, never 0."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.batch import Batch
from engine.data.prepare import Prompt
from engine.dataflows.roles import Roles
from engine.experience import prompt_batch, save_experience
from engine.workers.cost import CostWorker
from engine.workers.reward import RewardWorker
from engine.workers.rollout import RolloutWorker


def evaluate_suite(
    roles: Roles, prompts: list[Prompt], max_tokens: int, seed: int, folder: Path, accept: Callable[[Batch], None]
) -> dict[str, Any]:
    """Report of one suite, its answers saved under `folder`; accept: raises where too many of them have no score.

    {"rows", "unscored", "score_mean" (None = nothing was scored), "components" (mean of each, unweighted),
    "response_tokens_mean", "cut_share"}; of a run with scorers of cost also "cost_mean" and "cost_components".
    """
    folder.mkdir(parents=True)
    if not prompts:
        nothing = dict.fromkeys(("score_mean", "response_tokens_mean", "cut_share"))
        return {"rows": 0, "unscored": 0, "components": {}, **nothing}
    batch = prompt_batch(prompts, range(len(prompts)), seed, "evaluation")
    answers = roles.rollout.submit(RolloutWorker.generate_greedy, batch, max_tokens)
    scores = roles.reward.submit(RewardWorker.score, answers)
    costs = [] if roles.cost is None else [roles.cost.submit(CostWorker.score, answers)]
    batch = answers.result().merge(scores, *costs)
    accept(batch)
    save_experience(batch, folder)
    report = {
        "rows": len(prompts),
        "unscored": int(batch.scores.isnan().sum()),
        "score_mean": _mean(batch.scores.tolist()),
        "components": _component_means(batch.column("components")),
        "response_tokens_mean": float(batch.response_lengths.float().mean()),
        "cut_share": float((batch.finish_reason == 1).float().mean()),
    }
    if not costs:
        return report
    means = _component_means(batch.column("cost_components"))
    return {**report, "cost_mean": _mean(batch.costs.tolist()), "cost_components": means}


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else None


def _component_means(rows: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """Mean of every component over the answers that it scored; None where it scored none."""
    means: dict[str, float | None] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        known = [score for row in rows if (score := row.get(name)) is not None]
        means[name] = sum(known) / len(known) if known else None
    return means
