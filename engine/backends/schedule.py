"""The rate of every optimiser step, and how many steps were taken: warm-up, decay, or steering by the policy's own KL."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from engine.config import OptimizerConfig
from engine.errors import DivergedError, HybridFlowError

RATE_STEP = 1.5  # adaptive_kl: factor of one correction
BAND = 2.0  # adaptive_kl: no correction while the KL is within target / BAND and target * BAND


class Schedule:
    """Counts optimiser steps and gives their rates; what it has learned is part of the optimiser state."""

    def __init__(self, options: OptimizerConfig, total_steps: int) -> None:
        self.options = options
        self.total_steps = total_steps
        self.steps = 0
        self.scale = 1.0  # set by guards; no part of the state, which the controller keeps
        self._adapted = options.lr  # of adaptive_kl

    def rate(self) -> float:
        """Rate of the next step."""
        if self.options.schedule != "adaptive_kl":
            return self.scale * lr_at(self.steps, self.options, self.total_steps)
        return self.scale * self._adapted * min((self.steps + 1) / max(self.options.warmup_steps, 1), 1.0)

    def adapt(self, kl: float) -> None:
        """adaptive_kl: less rate where the policy moved too far, more where it hardly moved (Schulman et al. 2017, 4,
        applied to the rate), within lr_min and lr_max.

        kl: nats per token between the policies before the present experience was learned from and before the last
        optimiser step. Raises DivergedError if it is not finite.
        """
        target = self.options.kl_target
        if self.options.schedule != "adaptive_kl" or target is None:
            raise HybridFlowError(
                f"schedule {self.options.schedule} was told a KL.", remedy="Only schedule adaptive_kl uses one."
            )
        if not math.isfinite(kl):
            raise DivergedError(f"the policy's KL to itself before the update is {kl}; the rate cannot follow it.")
        factor = 1 / RATE_STEP if kl > target * BAND else RATE_STEP if kl < target / BAND else 1.0
        self._adapted = min(max(self._adapted * factor, self.options.lr_min), self.options.lr_max)

    def state(self) -> dict[str, Tensor]:
        """`step` (0-dim int64) and, of adaptive_kl, `rate` (0-dim float64)."""
        counted = {"step": torch.tensor(self.steps)}
        if self.options.schedule != "adaptive_kl":
            return counted
        return {**counted, "rate": torch.tensor(self._adapted, dtype=torch.float64)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue where `state` was taken."""
        self.steps = int(state["step"])
        if "rate" in self.state():
            self._adapted = float(state["rate"])


def lr_at(step: int, optimizer: OptimizerConfig, total_steps: int) -> float:
    """Rate of optimiser step `step`, counted from 0: linear warm-up to lr, then constant or down to 0.

    The last warm-up step has the full rate; 0 would be reached one step after the last.
    """
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return optimizer.lr
    span = max(total_steps - optimizer.warmup_steps, 1)
    done = min((step - optimizer.warmup_steps) / span, 1.0)
    if optimizer.schedule == "linear":
        return optimizer.lr * (1.0 - done)
    return optimizer.lr * 0.5 * (1.0 + math.cos(math.pi * done))
