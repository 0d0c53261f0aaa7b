"""AdamW as every training backend uses it: rate schedule, options, moments that always exist, state names."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Size, Tensor

from engine.backends.base import TrainerSpec
from engine.config import OptimizerConfig
from engine.errors import DivergedError

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"


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


def new_adamw(parameters: Iterable[Tensor], options: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over float32 tensors, moments at zero; its rate is 0 until `set_rate`."""
    adamw = torch.optim.AdamW(list(parameters), lr=0.0, fused=True)
    set_options(adamw, options)
    for group in adamw.param_groups:
        for parameter in group["params"]:
            moments = {name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in MOMENTS}
            adamw.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}
    return adamw


def set_options(adamw: torch.optim.Optimizer, options: OptimizerConfig) -> None:
    """Use these betas, eps and weight decay from the next step on."""
    for group in adamw.param_groups:
        group.update(betas=options.betas, eps=options.eps, weight_decay=options.weight_decay)


def set_rate(adamw: torch.optim.Optimizer, lr: float) -> None:
    """Use this rate from the next step on."""
    for group in adamw.param_groups:
        group["lr"] = lr


def set_steps(adamw: torch.optim.Optimizer, steps: int) -> None:
    """Let the bias correction continue after this many steps."""
    for state in adamw.state.values():
        state["step"].fill_(steps)


def clear_moments(adamw: torch.optim.Optimizer) -> None:
    """Back to the state before the first step, in place, because others may hold views."""
    for state in adamw.state.values():
        for tensor in state.values():
            tensor.zero_()


def state_shapes(parameters: Mapping[str, Size], has_master: bool) -> dict[str, Size]:
    """Names and shapes of a complete optimiser state of these parameters."""
    kinds = (*MOMENTS, MASTER) if has_master else MOMENTS
    return {"step": Size(), **{f"{name}/{kind}": shape for name, shape in parameters.items() for kind in kinds}}


def diverged(spec: TrainerSpec, step: int, norm: float) -> DivergedError:
    """The error of an optimiser step whose gradient is not finite."""
    return DivergedError(
        f"the gradient norm is {norm}; parameters and optimiser were left as they were.",
        remedy="Look at this step's loss metrics and its batch; a lower train.lr often helps.",
        head=spec.head,
        rank=spec.rank,
        optimizer_step=step,
    )
