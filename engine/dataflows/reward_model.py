"""Reward model (Ouyang et al. 2022): a score for prompt and completion, from which of two completions was preferred."""

from collections.abc import Sequence
from typing import Any

from engine.data.completions import Preference
from engine.dataflows.offline_roles import OfflineRoles, pair_batch
from engine.dataflows.ranking import ranking_report
from engine.metrics import Metrics
from engine.offlineconfig import OfflineConfig
from engine.workers.pairs import chosen_and_rejected
from engine.workers.score import ScoreWorker


def learn(roles: OfflineRoles, pairs: Sequence[Preference], config: OfflineConfig) -> Metrics:
    """One optimiser step."""
    metrics: Metrics = roles.model.call(ScoreWorker.update_reward, pair_batch(pairs), float(len(pairs)))
    return metrics


def measure(roles: OfflineRoles, pairs: Sequence[Preference], config: OfflineConfig) -> dict[str, Any]:
    """Report on held-out pairs, ranked by their scores."""
    scores = roles.model.call(ScoreWorker.compute_scores, pair_batch(pairs)).scores
    return ranking_report(*chosen_and_rejected(scores), bins=config.evaluation.bins)
