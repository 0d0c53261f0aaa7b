"""Picks the class that trains or scores a model; importing this file loads no backend."""

from engine.backends.base import Trainer, TrainerSpec


def build_trainer(spec: TrainerSpec) -> Trainer:
    """The trainer of train.backend; a frozen model needs DeepSpeed only where its weights are spread over ranks."""
    frozen = spec.optimizer is None
    if spec.train.backend == "deepspeed" and not (frozen and spec.train.zero_stage < 3):
        from engine.backends.deepspeed_train import DeepSpeedTrainer

        return DeepSpeedTrainer(spec)
    if spec.optimizer is None:
        from engine.backends.replicated import FrozenTrainer

        return FrozenTrainer(spec)
    from engine.backends.torch_train import TorchTrainer

    return TorchTrainer(spec, spec.optimizer)
