"""Picks the class that trains or scores a model; importing this file loads no backend."""

from typing import TYPE_CHECKING

from engine.backends.base import Trainer, TrainerSpec
from engine.config import OptimizerConfig

if TYPE_CHECKING:
    from engine.backends.layout import Layout


def build_trainer(spec: TrainerSpec) -> Trainer:
    """The trainer of train.backend; a frozen model needs DeepSpeed only where its weights are spread over ranks."""
    frozen = spec.optimizer is None
    if spec.train.backend == "deepspeed" and not (frozen and spec.train.zero_stage < 3):
        from engine.backends.deepspeed_train import DeepSpeedTrainer

        return DeepSpeedTrainer(spec)
    if spec.train.backend == "fsdp":
        from engine.backends.fsdp_train import FSDPLayout

        return _with_layout(FSDPLayout(spec), spec.optimizer)
    from engine.backends.torch_train import TorchLayout

    return _with_layout(TorchLayout(spec), spec.optimizer)


def _with_layout(layout: "Layout", optimizer: OptimizerConfig | None) -> Trainer:
    from engine.backends.learning import LearningTrainer
    from engine.backends.scoring import FrozenTrainer

    return FrozenTrainer(layout) if optimizer is None else LearningTrainer(layout, optimizer)
