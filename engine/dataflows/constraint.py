"""The cost side of Safe RLHF: which samples count on both sides, and how much the cost weighs."""

import torch

from engine.algorithms.lagrange import LagrangeController
from engine.batch import Batch
from engine.config import ConstraintConfig
from engine.dataflows.roles import Progress
from engine.errors import DivergedError
from engine.metrics import Metrics


def scored_on_both_sides(batch: Batch) -> Batch:
    """The batch with a sample that misses its score or its cost unscored on both sides."""
    missing = torch.isnan(batch.scores) | torch.isnan(batch.costs)
    return batch.with_fields(
        scores=torch.where(missing, torch.nan, batch.scores), costs=torch.where(missing, torch.nan, batch.costs)
    )


def update_multiplier(batch: Batch, options: ConstraintConfig, progress: Progress) -> tuple[float, Metrics, Progress]:
    """lambda after the step for this batch's mean cost, its metrics, and the progress that remembers it."""
    costs = batch.costs[~torch.isnan(batch.costs)]
    if not len(costs):
        raise DivergedError(
            f"None of the {len(batch)} samples has both a score and a cost.",
            remedy="Look at rollout/ of this iteration for what the scorers said.",
        )
    start = torch.tensor(options.multiplier_init, dtype=torch.float64).log().item()
    controller = LagrangeController(
        progress.controllers.get("log_multiplier", start),
        options.cost_limit,
        options.multiplier_lr,
        options.multiplier_max,
    ).updated(float(costs.mean()))
    metrics = Metrics().with_value("cost/cost_mean", float(costs.mean()), weight=len(costs))
    metrics = metrics.with_value(
        "cost/over_limit_share", float((costs > options.cost_limit).float().mean()), weight=len(costs)
    )
    metrics = metrics.with_value("cost/multiplier", controller.multiplier)
    return controller.multiplier, metrics, progress.with_controller("log_multiplier", controller.log_multiplier)
