"""Trainers whose ranks each hold the whole module: the shared part, and the frozen model of a reference."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.backends.base import LossFunction, Reader, Trainer, TrainerSpec
from engine.backends.modelling import build_module, named_weights
from engine.backends.weights import check_tensors
from engine.batch import Batch
from engine.config import OptimizerConfig
from engine.errors import HybridFlowError
from engine.metrics import Metrics


class ReplicatedTrainer(Trainer):
    """Scores with, hands out and replaces the weights of a module that is whole on every rank."""

    def __init__(self, spec: TrainerSpec) -> None:
        self.spec = spec
        self.module = build_module(spec).to(spec.device)
        self.named = named_weights(self.module)

    def score(self, parts: Sequence[Batch], read: Reader) -> list[Tensor]:
        """Each rank runs its own parts; no rank waits for another."""
        with torch.no_grad():
            return [read(self.output(part), part).cpu() for part in self.placed(parts)]

    def placed(self, parts: Sequence[Batch]) -> list[Batch]:
        """The parts on the module's device."""
        return [part.to(self.spec.device) for part in parts]

    def output(self, part: Batch) -> Tensor:
        """Logits [b, T, V] or values [b, T] of one micro-batch."""
        return self.module(part.input_ids, part.attention_mask)

    def weights(self) -> dict[str, Tensor]:
        """A snapshot: later steps do not change it."""
        if self.spec.rank > 0:
            return {}
        return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in self.named.items()}

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies into the module; nothing is copied if one name or shape is wrong."""
        check_tensors(tensors, {name: tensor.shape for name, tensor in self.named.items()}, "weights to be loaded")
        with torch.no_grad():
            for name, tensor in self.named.items():
                tensor.copy_(tensors[name])


class FrozenTrainer(ReplicatedTrainer):
    """A model that only scores, such as the reference policy; without gradients and without an optimiser."""

    def __init__(self, spec: TrainerSpec) -> None:
        super().__init__(spec)
        self.module.requires_grad_(False)

    @property
    def steps(self) -> int:
        """Always 0."""
        return 0

    def step(self, parts: Sequence[Batch], loss: LossFunction) -> Metrics:
        """Refused."""
        raise self._refusal("trained")

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
