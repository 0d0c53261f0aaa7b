"""The Lagrange multiplier of Safe RLHF (Dai et al. 2024): most reward while the mean cost stays under a limit."""

import math
from dataclasses import dataclass, replace

from torch import Tensor

from engine.algorithms.masked import as_float
from engine.errors import ShapeError


@dataclass(frozen=True)
class LagrangeController:
    """Owns log_multiplier (nu); the multiplier is lambda = exp(nu) <= max_multiplier.

    cost_limit: d, cost units, positive = harmful; lr: step of nu per unit of cost. Raises ValueError unless lr >= 0 and
    max_multiplier > 0. dataclasses.asdict gives the JSON form of the state.
    """

    log_multiplier: float
    cost_limit: float
    lr: float
    max_multiplier: float

    def __post_init__(self) -> None:
        if not (self.lr >= 0 and self.max_multiplier > 0):
            raise ValueError(
                f"the multiplier needs lr >= 0 and max_multiplier > 0, found {self.lr} and {self.max_multiplier}."
            )

    @property
    def multiplier(self) -> float:
        """lambda, the weight of cost against reward."""
        return math.exp(min(self.log_multiplier, math.log(self.max_multiplier)))

    def updated(self, mean_cost: float) -> "LagrangeController":
        """The state after nu <- min(nu + lr * (mean_cost - cost_limit), log(max_multiplier)).

        mean_cost: over the scored samples of the step. Raises ValueError if it is not finite.
        """
        if not math.isfinite(mean_cost):
            raise ValueError(f"the mean cost is {mean_cost}: no sample of this step has a cost, or one is not finite.")
        moved = self.log_multiplier + self.lr * (mean_cost - self.cost_limit)
        return replace(self, log_multiplier=min(moved, math.log(self.max_multiplier)))


def safe_advantages(reward_advantages: Tensor, cost_advantages: Tensor, multiplier: float) -> Tensor:
    """(A_reward - lambda * A_cost) / (1 + lambda), any shape; multiplier: lambda >= 0.

    Dividing by 1 + lambda keeps the size of the update while lambda moves. A sample that misses its score or its
    cost has advantage 0 on that side only: take it out of the mask of the loss.
    """
    if reward_advantages.shape != cost_advantages.shape:
        raise ShapeError(
            f"reward advantages are {tuple(reward_advantages.shape)}, cost advantages {tuple(cost_advantages.shape)}.",
            remedy="Estimate both for the same responses.",
        )
    if not multiplier >= 0:
        raise ValueError(f"the Lagrange multiplier must be >= 0, found {multiplier}.")
    return (as_float(reward_advantages) - multiplier * as_float(cost_advantages)) / (1.0 + multiplier)
