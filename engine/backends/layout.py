"""Where the tensors of one module lie: whole on every rank, cut over tensor-parallel ranks, or over data ranks as well."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Size, Tensor, nn
from torch.distributed.tensor import DTensor

from engine.backends.base import TrainerSpec
from engine.backends.modelling import Model, named_weights
from engine.backends.ranks import Mesh, gather_along, part_along, sum_over_ranks
from engine.backends.tensor_parallel import Cut
from engine.batch import Batch


class Layout(ABC):
    """One module on this rank. Parts are plain tensors that share memory with the module's own.

    lockstep: every pass is a collective over the data axis, so its ranks must run equally many.
    masters_apart: the optimiser updates float32 copies, from which the module's weights are rounded.
    """

    lockstep: bool
    masters_apart: bool

    def __init__(self, spec: TrainerSpec, mesh: Mesh, module: Model, cut: Cut) -> None:
        self.spec = spec
        self.mesh = mesh
        self.module = module
        self.named = named_weights(module)
        self._cut = cut

    @property
    def shapes(self) -> dict[str, Size]:
        """Whole shape of every tensor by Hugging Face name."""
        return {name: self._cut.shapes[name] for name in self.named}

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that learn, by Hugging Face name."""
        return {
            name: tensor
            for name, tensor in self.named.items()
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad
        }

    def output(self, part: Batch) -> Tensor:
        """Logits [b, T, V] or values [b, T] of one micro-batch."""
        return self.module(part.input_ids, part.attention_mask)  # type: ignore[no-any-return]

    def empty_output(self) -> Tensor:
        """A pass over one masked token, to keep step with ranks that hold more."""
        one_token = torch.zeros(1, 1, dtype=torch.int64, device=self.spec.device)
        return self.module(one_token, one_token == 0)  # type: ignore[no-any-return]

    def whole(self, name: str, part: Tensor) -> Tensor:
        """A tensor put together from every rank's part of it; all ranks call together."""
        shape, dim = self._cut.shapes[name], self._cut.dims.get(name)
        if self._over_data(name):
            rows = shape[0] if dim != 0 else shape[0] // self.mesh.tensor.size
            part = gather_along(part, self.mesh.data, 0, rows)
        return part if dim is None else gather_along(part, self.mesh.tensor, dim, shape[dim])

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor."""
        dim = self._cut.dims.get(name)
        part = whole if dim is None else part_along(whole, self.mesh.tensor, dim)
        return part_along(part, self.mesh.data, 0) if self._over_data(name) else part

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of one micro-batch to those of the step; last: this rank has no more of them."""
        loss.backward()

    def gradients(self) -> dict[str, Tensor]:
        """This rank's parts of the gradients, summed over all ranks, in float32; the module's are taken away."""
        found = self._summed_over_data()
        sum_over_ranks([found[name] for name in sorted(self._cut.partial & found.keys())], self.mesh.tensor)
        return found

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        """Norm of all gradients of all ranks, each of their parts counted once."""
        if not self._cut.dims and not any(self._over_data(name) for name in gradients):
            return float(nn.utils.get_total_norm(list(gradients.values())))  # whole and the same on every rank
        norm = nn.utils.get_total_norm([tensor for name, tensor in gradients.items() if self._counted_here(name)])
        squares = norm.double().square().to(self.spec.device)
        if self.mesh.everyone.size > 1:
            dist.all_reduce(squares, group=self.mesh.everyone.group)
        return float(squares.sqrt())

    def _counted_here(self, name: str) -> bool:
        first_of_data = self._over_data(name) or self.mesh.data.rank == 0
        return first_of_data and (name in self._cut.dims or self.mesh.tensor.rank == 0)

    @abstractmethod
    def _over_data(self, name: str) -> bool:
        """Whether a tensor is cut along its first dimension over the data axis, after any other cut."""

    def _summed_over_data(self) -> dict[str, Tensor]:
        """Gradients, float32, as the backward pass has left them: of all rows on the data axis."""
        found = {}
        for name, parameter in self.trained.items():
            found[name] = gradient_part(parameter)
            parameter.grad = None
        return found


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter or buffer, detached, in the same memory."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def gradient_part(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a gradient, float32; zeros where the backward pass has reached nothing."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(local(parameter), dtype=torch.float32)
    if isinstance(gradient, DTensor):
        gradient = gradient.redistribute(placements=parameter.placements).to_local()  # type: ignore[attr-defined]
    return gradient.detach().float()
