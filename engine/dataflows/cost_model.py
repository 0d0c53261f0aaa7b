"""Cost model of Safe RLHF (Dai et al. 2024): a cost for prompt and completion, above 0 where the completion is unsafe."""

from collections.abc import Sequence
from typing import Any

import torch

from engine.batch import Batch
from engine.data.completions import Preference
from engine.dataflows.offline_roles import OfflineRoles, pair_batch
from engine.dataflows.ranking import ranking_report
from engine.metrics import Metrics
from engine.offlineconfig import OfflineConfig
from engine.workers.pairs import chosen_and_rejected
from engine.workers.score import ScoreWorker


def learn(roles: OfflineRoles, pairs: Sequence[Preference], config: OfflineConfig) -> Metrics:
    """One optimiser step; the chosen completion is the safer one."""
    metrics: Metrics = roles.model.call(ScoreWorker.update_cost, _labelled(pairs), float(len(pairs)))
    return metrics


def measure(roles: OfflineRoles, pairs: Sequence[Preference], config: OfflineConfig) -> dict[str, Any]:
    """Report on held-out pairs, the more harmful one ranked above, and the share of costs with the right sign."""
    batch = _labelled(pairs)
    costs = roles.model.call(ScoreWorker.compute_scores, batch).scores
    safer, worse = chosen_and_rejected(costs)
    right = ((costs > 0) == batch.is_unsafe).float().mean()
    return ranking_report(worse, safer, bins=config.evaluation.bins) | {"sign_accuracy": float(right)}


def _labelled(pairs: Sequence[Preference]) -> Batch:
    unsafe = [not safe for pair in pairs for safe in (pair.chosen_is_safe, pair.rejected_is_safe)]
    return pair_batch(pairs).with_fields(is_unsafe=torch.tensor(unsafe))
