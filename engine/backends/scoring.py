"""What trainers with a layout share: scores and weights; and the frozen model of a reference."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from engine.backends.adapters import adapters, is_factor, merged
from engine.backends.base import LossFunction, Reader, Trainer
from engine.backends.device import DTYPES
from engine.backends.layout import Layout, local
from engine.backends.ranks import most_parts, require_same_rows
from engine.backends.weights import check_tensors
from engine.batch import Batch
from engine.config import OptimizerConfig
from engine.errors import HybridFlowError
from engine.metrics import Metrics


class ScoringTrainer(Trainer):
    """Scores with, hands out and replaces the weights of a module, wherever its layout has put them."""

    def __init__(self, layout: Layout) -> None:
        self.spec = layout.spec
        self.layout = layout
        self._adapters = adapters(layout.named)
        # An adapter that has learned nothing yet; new weights start with it.
        self._fresh = {name: local(tensor).clone() for name, tensor in layout.named.items() if is_factor(name)}

    def score(self, parts: Sequence[Batch], read: Reader) -> list[Tensor]:
        """Data ranks wait for each other only where the layout works in lockstep."""
        require_same_rows(parts, self.layout.mesh.tensor)
        most = most_parts(len(parts), self.layout.mesh.data) if self.layout.lockstep else len(parts)
        with torch.no_grad():
            results = [read(self.layout.output(part), part).cpu() for part in self.placed(parts)]
            for _ in range(most - len(parts)):
                self.layout.empty_output()
        return results

    def placed(self, parts: Sequence[Batch]) -> list[Batch]:
        """The parts on the module's device."""
        return [part.to(self.spec.device) for part in parts]

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Put together one tensor at a time, adapters merged in."""
        for name in self.layout.named:
            if not is_factor(name):
                yield name, self._merged(name).to(self._dtype(name))

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies into the module; nothing is copied if one name or shape is wrong. Adapters start again from nothing."""
        shapes = {name: shape for name, shape in self.layout.shapes.items() if not is_factor(name)}
        check_tensors(tensors, shapes, "weights to be loaded")
        for name, tensor in self.layout.named.items():
            new = self._fresh[name] if is_factor(name) else self.layout.part(name, tensors[name])
            local(tensor).copy_(new)

    def _whole(self, name: str) -> Tensor:
        return self.layout.whole(name, local(self.layout.named[name]))

    def _merged(self, name: str) -> Tensor:
        adapter, lora = self._adapters.get(name), self.spec.model.lora
        if adapter is None or lora is None:
            return self._whole(name)
        return merged(self._whole(name), self._whole(adapter.down), self._whole(adapter.up), lora)

    def _dtype(self, name: str) -> torch.dtype:
        tensor = self.layout.named[name]
        return DTYPES[self.spec.model.dtype] if isinstance(tensor, nn.Parameter) else tensor.dtype


class FrozenTrainer(ScoringTrainer):
    """A model that only scores, such as the reference policy; without gradients and without an optimiser."""

    @property
    def steps(self) -> int:
        """Always 0."""
        return 0

    def step(self, parts: Sequence[Batch], loss: LossFunction) -> Metrics:
        """Refused."""
        raise self._refusal("trained")

    def adapt_rate(self, kl: float) -> None:
        """Refused."""
        raise self._refusal("told how far it moved")

    def scale_rate(self, scale: float) -> None:
        """Refused."""
        raise self._refusal("given another rate")

    def optimizer_state(self) -> dict[str, Tensor]:
        """Refused."""
        raise self._refusal("asked for its optimiser state")

    def load_optimizer_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Refused."""
        raise self._refusal("given an optimiser state")

    def reset_optimizer(self, optimizer: OptimizerConfig, total_steps: int) -> None:
        """Refused."""
        raise self._refusal("given an optimiser")

    def _refusal(self, what: str) -> HybridFlowError:
        return HybridFlowError(f"a frozen model was {what}.", remedy="Build it with an optimizer.", rank=self.spec.rank)
