"""The optimiser step that plain torch and FSDP share: gradients of all ranks, clipped, applied to this rank's parts."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from engine.backends.adapters import BASE
from engine.backends.base import LossFunction
from engine.backends.layout import Layout, local
from engine.backends.optimizer import (
    MASTER,
    diverged,
    fill_state,
    moments,
    new_optimizer,
    set_rate,
    set_steps,
    state_shapes,
)
from engine.backends.ranks import merge_over_ranks, most_parts_to_learn, require_same_rows
from engine.backends.schedule import Schedule
from engine.backends.scoring import ScoringTrainer
from engine.backends.weights import check_tensors
from engine.batch import Batch
from engine.config import OptimizerConfig
from engine.metrics import Metrics, from_pairs


class LearningTrainer(ScoringTrainer):
    """A module and an optimiser over plain float32 tensors: this rank's parts of the weights.

    Every optimiser here works element by element, so parts can be updated alone once the norm of the whole is known.
    With model.dtype bfloat16 those are the masters, from which the weights that compute are rounded.
    """

    def __init__(self, layout: Layout, optimizer: OptimizerConfig) -> None:
        super().__init__(layout)
        # Adapters are in no saved weights, so their state always holds them.
        self._has_master = self.spec.model.dtype != "float32" or bool(self._adapters)
        self._masters = {name: local(parameter).float() for name, parameter in layout.trained.items()}
        self._start(optimizer, self.spec.total_steps)

    def _start(self, options: OptimizerConfig, total_steps: int) -> None:
        self._schedule = Schedule(options, total_steps)
        self._optimizer = new_optimizer(self._masters.values(), options)
        fill_state(self._optimizer, options)

    @property
    def steps(self) -> int:
        """Optimiser steps applied so far since the last reset."""
        return self._schedule.steps

    def step(self, parts: Sequence[Batch], loss: LossFunction) -> Metrics:
        """Every rank adds up the gradients of its own parts; then they are summed over ranks."""
        mesh = self.layout.mesh
        require_same_rows(parts, mesh.tensor)
        most = most_parts_to_learn(len(parts), mesh.data) if self.layout.lockstep else len(parts)
        metrics = Metrics()
        for number, part in enumerate(self.placed(parts), 1):
            result = loss(self.layout.output(part), part)
            self.layout.backward(result.loss, last=number == len(parts))
            metrics = metrics | from_pairs(result.metrics)
        for _ in range(most - len(parts)):
            (self.layout.empty_output().float().sum() * 0.0).backward()
        gradients = self.layout.gradients()
        merged = merge_over_ranks(metrics, len(parts), mesh.data)
        norm = self.layout.norm(gradients)
        if not math.isfinite(norm):
            raise diverged(self.spec, self.steps, norm)
        rate = self._schedule.rate()
        self._update(gradients, rate, norm)
        self._schedule.steps += 1
        return merged.with_value("train/grad_norm", norm).with_value("train/lr", rate)

    def adapt_rate(self, kl: float) -> None:
        """Schedule adaptive_kl: choose the rate of the next steps."""
        self._schedule.adapt(kl)

    def scale_rate(self, scale: float) -> None:
        """Of the schedule's rates, until the next reset."""
        self._schedule.scale = scale

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Also the float32 masters start from these weights, until an optimiser state with better ones is loaded."""
        super().load_weights(tensors)
        if self.layout.masters_apart:
            for name, parameter in self.layout.trained.items():
                self._masters[name].copy_(local(parameter))

    def optimizer_state(self) -> dict[str, Tensor]:
        """A snapshot on rank 0, put together one tensor at a time. Of adapters also `PARAM/master` in any type, and
        `PARAM/base` of the frozen weights under them, which saved weights have merged.
        """
        state = self._schedule.state()
        for name, master in self._masters.items():
            for kind in self._kinds:
                part = master if kind == MASTER else self._optimizer.state[master][kind]
                whole = self.layout.whole(name, part)
                if self.spec.rank == 0:
                    state[f"{name}/{kind}"] = whole.to("cpu", copy=True).contiguous()
        for name in self._adapters:
            whole = self._whole(name)
            if self.spec.rank == 0:
                state[f"{name}/{BASE}"] = whole.to("cpu", self._dtype(name), copy=True).contiguous()
        return state if self.spec.rank == 0 else {}

    def load_optimizer_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Moments, step count and masters, each rank taking its part; load the weights first."""
        shapes = {name: self.layout.shapes[name] for name in self._masters}
        wanted = state_shapes(shapes, self._kinds, self._schedule.state())
        wanted |= {f"{name}/{BASE}": self.layout.shapes[name] for name in self._adapters}
        check_tensors(tensors, wanted, "optimiser state to be loaded")
        for name, master in self._masters.items():
            for kind in self._kinds:
                part = master if kind == MASTER else self._optimizer.state[master][kind]
                part.copy_(self.layout.part(name, tensors[f"{name}/{kind}"]))
            if self.layout.masters_apart:
                local(self.layout.trained[name]).copy_(self._masters[name])
        for name in self._adapters:
            local(self.layout.named[name]).copy_(self.layout.part(name, tensors[f"{name}/{BASE}"]))
        self._schedule.load(tensors)
        set_steps(self._optimizer, self.steps)

    def reset_optimizer(self, optimizer: OptimizerConfig, total_steps: int) -> None:
        """The weights stay as they are."""
        self._start(optimizer, total_steps)

    @property
    def _kinds(self) -> tuple[str, ...]:
        kinds = moments(self._schedule.options)
        return (*kinds, MASTER) if self._has_master else kinds

    def _update(self, gradients: Mapping[str, Tensor], rate: float, norm: float) -> None:
        for name, master in self._masters.items():
            master.grad = gradients[name]
        limit = self._schedule.options.max_grad_norm
        nn.utils.clip_grads_with_norm_(list(self._masters.values()), limit, torch.tensor(norm))
        set_rate(self._optimizer, rate)
        self._optimizer.step()
        for name, parameter in self.layout.trained.items():
            self._masters[name].grad = None
            if self.layout.masters_apart:
                local(parameter).copy_(self._masters[name])
