"""Evaluation of one suite: greedy answers, scored by the run's reward; what could not be scored is counted, never 0."""

import math
from pathlib import Path
from typing import Any

from engine.data.prepare import Prompt
from engine.dataflows.roles import Roles
from engine.experience import prompt_batch, save_experience
from engine.workers.reward import RewardWorker
from engine.workers.rollout import RolloutWorker


def evaluate_suite(roles: Roles, prompts: list[Prompt], max_tokens: int, seed: int, folder: Path) -> dict[str, Any]:
    """Report of one suite, its answers saved under `folder`.

    {"rows", "unscored", "score_mean" (None = nothing was scored), "response_tokens_mean", "cut_share"}.
    """
    folder.mkdir(parents=True)
    if not prompts:
        return {"rows": 0, "unscored": 0, "score_mean": None, "response_tokens_mean": None, "cut_share": None}
    batch = prompt_batch(prompts, range(len(prompts)), seed, "evaluation")
    batch = roles.rollout.call(RolloutWorker.generate_greedy, batch, max_tokens)
    batch = batch.merge(roles.reward.submit(RewardWorker.score, batch))
    save_experience(batch, folder)
    scores = [score for score in batch.scores.tolist() if not math.isnan(score)]
    return {
        "rows": len(prompts),
        "unscored": len(prompts) - len(scores),
        "score_mean": sum(scores) / len(scores) if scores else None,
        "response_tokens_mean": float(batch.response_lengths.float().mean()),
        "cut_share": float((batch.finish_reason == 1).float().mean()),
    }
