"""DPO (Rafailov et al. 2023): the model learns from pairs, compared with the frozen start checkpoint."""

from collections.abc import Sequence
from typing import Any

from engine.algorithms.masked import masked_mean, masked_sum
from engine.batch import Batch
from engine.data.completions import Preference
from engine.dataflows.offline_roles import OfflineRoles, pair_batch
from engine.dataflows.ranking import ranking_report
from engine.metrics import Metrics
from engine.offlineconfig import DPOObjective, OfflineConfig
from engine.workers.pairs import chosen_and_rejected
from engine.workers.preference import PreferenceWorker

_KINDS = {"sigmoid": "sigmoid", "length_normalised": "length-normalised", "ipo": "ipo"}


def learn(roles: OfflineRoles, pairs: Sequence[Preference], config: OfflineConfig) -> Metrics:
    """One optimiser step."""
    objective = config.objective
    assert isinstance(objective, DPOObjective)
    batch = _with_reference(roles, pair_batch(pairs))
    metrics: Metrics = roles.model.call(
        PreferenceWorker.update_dpo, batch, _KINDS[objective.variant], objective.beta, float(len(pairs))
    )
    return metrics


def measure(roles: OfflineRoles, pairs: Sequence[Preference], config: OfflineConfig) -> dict[str, Any]:
    """Report on held-out pairs, ranked by the implicit reward beta (log pi - log pi_ref) as the variant reduces it."""
    objective = config.objective
    assert isinstance(objective, DPOObjective)
    batch = _with_reference(roles, pair_batch(pairs))
    logprobs = roles.model.call(PreferenceWorker.score_completions, batch).logprobs
    reduce = masked_mean if objective.variant == "length_normalised" else masked_sum
    rewards = objective.beta * reduce(logprobs - batch.ref_logprobs, batch.response_mask, -1)
    return ranking_report(*chosen_and_rejected(rewards), bins=config.evaluation.bins)


def _with_reference(roles: OfflineRoles, batch: Batch) -> Batch:
    scored = roles.reference.call(PreferenceWorker.score_completions, batch)
    return batch.with_fields(ref_logprobs=scored.logprobs)
