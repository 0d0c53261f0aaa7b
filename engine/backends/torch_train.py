"""Training in plain torch: whole module on every rank, summed gradients, AdamW on float32 weights."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from engine.backends.base import LossFunction, TrainerSpec
from engine.backends.optimizer import (
    MASTER,
    MOMENTS,
    clear_moments,
    diverged,
    lr_at,
    new_adamw,
    set_options,
    set_rate,
    set_steps,
    state_shapes,
)
from engine.backends.ranks import merge_over_ranks, most_parts_to_learn, require_group, sum_over_ranks
from engine.backends.replicated import ReplicatedTrainer
from engine.backends.weights import check_tensors
from engine.batch import Batch
from engine.config import OptimizerConfig
from engine.metrics import Metrics, from_pairs


class TorchTrainer(ReplicatedTrainer):
    """The simplest backend, and the one the others are compared with.

    With model.dtype bfloat16 the module computes in it, gradients add up in float32 and AdamW updates a float32 master
    copy of the weights, from which the module's are rounded after each step.
    """

    def __init__(self, spec: TrainerSpec, optimizer: OptimizerConfig) -> None:
        super().__init__(spec)
        if spec.world_size > 1:
            require_group(spec)
        self._options, self._total_steps, self._steps = optimizer, spec.total_steps, 0
        self._parameters = {name: tensor for name, tensor in self.named.items() if isinstance(tensor, nn.Parameter)}
        self._has_master = spec.model.dtype != "float32"
        self._masters: dict[str, Tensor] = dict(self._parameters)
        if self._has_master:
            for name, parameter in self._parameters.items():
                parameter.grad_dtype = torch.float32
                self._masters[name] = parameter.detach().float()
        self._adamw = new_adamw(self._masters.values(), optimizer)

    @property
    def steps(self) -> int:
        """Optimiser steps applied so far since the last reset."""
        return self._steps

    def step(self, parts: Sequence[Batch], loss: LossFunction) -> Metrics:
        """Every rank adds up the gradients of its own parts; then one sum over ranks."""
        most_parts_to_learn(len(parts), self.spec)
        self._drop_gradients()
        metrics = Metrics()
        for part in self.placed(parts):
            result = loss(self.output(part), part)
            result.loss.backward()
            metrics = metrics | from_pairs(result.metrics)
        norm = self._sum_gradients()
        if not math.isfinite(norm):
            self._drop_gradients()
            raise diverged(self.spec, self._steps, norm)
        rate = lr_at(self._steps, self._options, self._total_steps)
        self._update(rate, norm)
        self._steps += 1
        merged = merge_over_ranks(metrics, self.spec)
        return merged.with_value("train/grad_norm", norm).with_value("train/lr", rate)

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Also the float32 masters start from these weights, until an optimiser state with better ones is loaded."""
        super().load_weights(tensors)
        if self._has_master:
            for name, parameter in self._parameters.items():
                self._masters[name].copy_(parameter.detach())

    def optimizer_state(self) -> dict[str, Tensor]:
        """A snapshot on rank 0."""
        if self.spec.rank > 0:
            return {}
        state = {"step": torch.tensor(self._steps)}
        for name, master in self._masters.items():
            for kind in MOMENTS:
                state[f"{name}/{kind}"] = self._adamw.state[master][kind].to("cpu", copy=True)
            if self._has_master:
                state[f"{name}/{MASTER}"] = master.to("cpu", copy=True)
        return state

    def load_optimizer_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Moments, step count and masters; load the weights first."""
        shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        check_tensors(tensors, state_shapes(shapes, self._has_master), "optimiser state to be loaded")
        for name, master in self._masters.items():
            for kind in MOMENTS:
                self._adamw.state[master][kind].copy_(tensors[f"{name}/{kind}"])
            if self._has_master:
                master.copy_(tensors[f"{name}/{MASTER}"])
        self._steps = int(tensors["step"])
        set_steps(self._adamw, self._steps)

    def reset_optimizer(self, optimizer: OptimizerConfig, total_steps: int) -> None:
        """The weights stay as they are."""
        self._options, self._total_steps, self._steps = optimizer, total_steps, 0
        set_options(self._adamw, optimizer)
        clear_moments(self._adamw)

    def _sum_gradients(self) -> float:
        """Global norm of the gradients, which are now those of all ranks and lie on the masters."""
        for name, parameter in self._parameters.items():
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(self._masters[name])
            parameter.grad = None
            self._masters[name].grad = gradient
        gradients = [master.grad for master in self._masters.values() if master.grad is not None]
        sum_over_ranks(gradients, self.spec)
        return float(nn.utils.get_total_norm(gradients))

    def _update(self, rate: float, norm: float) -> None:
        masters = list(self._masters.values())
        nn.utils.clip_grads_with_norm_(masters, self._options.max_grad_norm, torch.tensor(norm))
        set_rate(self._adamw, rate)
        self._adamw.step()
        if self._has_master:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.copy_(self._masters[name])
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for tensor in (*self._parameters.values(), *self._masters.values()):
            tensor.grad = None
