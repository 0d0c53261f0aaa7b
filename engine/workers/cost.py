"""The cost side of Safe RLHF: what a response costs, and the critic that expects it."""

from engine.batch import Batch
from engine.controller.dispatch import DP, ROWS, ROWS_TO_FIRST, dispatch
from engine.controller.stream import Arriving
from engine.metrics import Metrics
from engine.workers.critic import CriticWorker
from engine.workers.reward import SCORED, RewardWorker
from engine.workers.trained import SEQUENCE


class CostWorker(RewardWorker):
    """One rank of the scorers of harm, configured by `cost`."""

    section = "cost"

    @dispatch(DP, reads=SCORED, streams=True)
    def score(self, batch: Batch | Arriving) -> Batch:
        """costs [B], positive = harmful, NaN = unscored, and the columns `cost_components` and `cost_unscored`."""
        scored = super().score(batch)
        columns = {f"cost_{name}": values for name, values in scored.columns.items()}
        return Batch({"costs": scored.scores}, columns)


class CostCriticWorker(CriticWorker):
    """One rank of the critic of costs."""

    @dispatch(ROWS, reads=(*SEQUENCE, "finish_reason"))
    def compute_values(self, batch: Batch) -> Batch:
        """cost_values [B, R] and cost_bootstrap_values [B], as the critic of rewards has them."""
        valued = super().compute_values(batch)
        return Batch({"cost_values": valued.values, "cost_bootstrap_values": valued.bootstrap_values})

    @dispatch(ROWS_TO_FIRST, reads=(*SEQUENCE, "cost_values", "cost_returns", "mini_batch"))
    def update(self, batch: Batch, normalizers: list[float]) -> Metrics:
        """All optimiser steps of one iteration; metrics under cost_critic/ and cost_value/."""
        metrics = super().update(batch.with_fields(values=batch.cost_values, returns=batch.cost_returns), normalizers)
        return metrics.renamed({"critic/": "cost_critic/", "value/": "cost_value/"})
