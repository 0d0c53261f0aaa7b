"""Optimisers by name, as every training backend uses them: options, moments that always exist, names of their state."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Size, Tensor

from engine.backends.base import TrainerSpec
from engine.config import OptimizerConfig
from engine.errors import DivergedError

MASTER = "master"
CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}
_FUSED = ("adamw", "adam", "sgd")  # have an implementation that updates all tensors in one kernel


def moments(options: OptimizerConfig) -> tuple[str, ...]:
    """Kinds of tensors, each in the shape of its parameter, that this optimiser keeps from step to step."""
    velocity = ("momentum_buffer",) if options.momentum > 0 else ()
    if options.optimizer in ("adamw", "adam"):
        return ("exp_avg", "exp_avg_sq")
    return ("square_avg", *velocity) if options.optimizer == "rmsprop" else velocity


def same_kind(left: OptimizerConfig, right: OptimizerConfig) -> bool:
    """Whether a trainer built for one can be reset to the other."""
    return (left.optimizer, moments(left)) == (right.optimizer, moments(right))


def new_optimizer(
    parameters: Iterable[Tensor], options: OptimizerConfig, kind: type[torch.optim.Optimizer] | None = None
) -> torch.optim.Optimizer:
    """The named optimiser (or a subclass of it) over float32 tensors; its rate is 0 until `set_rate`."""
    fused = {"fused": True} if options.optimizer in _FUSED else {}
    optimizer: Any = kind or CLASSES[options.optimizer]
    return optimizer(list(parameters), lr=0.0, **fused, **_arguments(options))  # type: ignore[no-any-return]


def fill_state(optimizer: torch.optim.Optimizer, options: OptimizerConfig) -> None:
    """Make the moments, at zero, that the optimiser would make in its first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = {name: torch.zeros_like(parameter) for name in moments(options)}
            counted = {} if options.optimizer == "sgd" else {"step": torch.zeros((), device=parameter.device)}
            optimizer.state[parameter] = {**counted, **state}


def _arguments(options: OptimizerConfig) -> dict[str, Any]:
    names = {
        "adamw": ("betas", "eps"),
        "adam": ("betas", "eps"),
        "rmsprop": ("alpha", "eps", "momentum"),
        "sgd": ("momentum", "nesterov"),
    }[options.optimizer]
    values = options.model_dump()
    return {name: values[name] for name in (*names, "weight_decay")}


def set_options(optimizer: torch.optim.Optimizer, options: OptimizerConfig) -> None:
    """Use these options from the next step on."""
    for group in optimizer.param_groups:
        group.update(_arguments(options))


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use this rate from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def set_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Let the bias correction continue after this many steps."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(steps)


def clear_moments(optimizer: torch.optim.Optimizer) -> None:
    """Back to the state before the first step, in place, because others may hold views."""
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()


def state_shapes(
    parameters: Mapping[str, Size], kinds: Iterable[str], schedule: Mapping[str, Tensor]
) -> dict[str, Size]:
    """Names and shapes of a complete optimiser state of these parameters under this schedule."""
    named = {f"{name}/{kind}": shape for name, shape in parameters.items() for kind in kinds}
    return {**{name: value.shape for name, value in schedule.items()}, **named}


def diverged(spec: TrainerSpec, step: int, norm: float) -> DivergedError:
    """The error of an optimiser step whose gradient is not finite."""
    return DivergedError(
        f"the gradient norm is {norm}; parameters and optimiser were left as they were.",
        remedy="Look at this step's loss metrics and its batch; a lower train.lr often helps.",
        head=spec.head,
        rank=spec.rank,
        optimizer_step=step,
    )
