"""Training in plain torch: copies of the module that sum their gradients, each on one rank or cut over several."""

import torch
from torch import Tensor

from engine.backends.base import TrainerSpec
from engine.backends.buckets import GradientBuckets
from engine.backends.layout import Layout, gradient_part, local
from engine.backends.modelling import build_module
from engine.backends.ranks import open_mesh
from engine.backends.tensor_parallel import cut_layers


class TorchLayout(Layout):
    """The simplest layout, and the one the others are compared with.

    With model.dtype bfloat16 the module computes in it, gradients add up in float32 and the optimiser updates a float32
    master copy of the weights, from which the module's are rounded after each step.
    """

    lockstep = False

    def __init__(self, spec: TrainerSpec) -> None:
        mesh = open_mesh(spec)
        module = build_module(spec).to(spec.device)
        super().__init__(spec, mesh, module, cut_layers(module, mesh))
        self.masters_apart = spec.model.dtype != "float32"
        if spec.optimizer is None:
            module.requires_grad_(False)
        elif self.masters_apart:
            for parameter in self.trained.values():
                parameter.grad_dtype = torch.float32
        self._buckets: GradientBuckets | None = None
        if mesh.data.size > 1 and self.trained:
            shapes = {name: local(parameter).shape for name, parameter in self.trained.items()}
            self._buckets = GradientBuckets(self.trained, shapes, gradient_part, mesh.data)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Sums over data ranks begin while the last one runs."""
        if last and self._buckets is not None:
            self._buckets.open()
        loss.backward()

    def _over_data(self, name: str) -> bool:
        return False

    def _summed_over_data(self) -> dict[str, Tensor]:
        return super()._summed_over_data() if self._buckets is None else self._buckets.summed()
