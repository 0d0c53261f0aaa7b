"""Training with FSDP2: every layer's weights are cut over the data ranks and whole only while the layer computes."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from engine.backends.base import TrainerSpec
from engine.backends.device import DTYPES
from engine.backends.layout import Layout
from engine.backends.modelling import Model, build_module
from engine.backends.ranks import Mesh, open_mesh
from engine.backends.tensor_parallel import cut_layers


class FSDPLayout(Layout):
    """Weights, gradients and optimiser state are spread; layers may be cut over tensor-parallel ranks before.

    A trained module keeps its parts in float32 and computes in model.dtype: its parameters are the masters. Backward
    sums gradients over ranks in float32.
    """

    lockstep = True
    masters_apart = False

    def __init__(self, spec: TrainerSpec) -> None:
        mesh = open_mesh(spec, alone=True)
        module = build_module(spec)
        if spec.optimizer is None:
            module.requires_grad_(False)
        else:
            for parameter in module.parameters():
                parameter.data = parameter.data.float()
        if mesh.tensor.size > 1:
            module = module.to(spec.device)  # else layers move to the device one by one as they are cut
        cut = cut_layers(module, mesh)
        _shard(module, spec, mesh)
        super().__init__(spec, mesh, module, cut)

    def _over_data(self, name: str) -> bool:
        return isinstance(self.named[name], nn.Parameter)


def _shard(module: Model, spec: TrainerSpec, mesh: Mesh) -> None:
    """Cut layer by layer, then what lies outside of layers."""
    dtype = DTYPES[spec.model.dtype]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    layers = [child for child in module.modules() if type(child).__name__ in module.layer_classes]
    for part in (*layers, module):
        # Also the outermost part is given back after the forward pass: kept, it would be stale after new weights.
        fully_shard(part, mesh=mesh.device_mesh["data"], mp_policy=policy, reshard_after_forward=True)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)  # losses are shares of the whole step: gradients add up
            part.set_force_sum_reduction_for_comms(True)
