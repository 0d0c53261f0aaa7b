"""What policy and critic share: a trainer, its state in a committed folder, and optimiser steps over mini-batches."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.backends.base import Loss, Trainer, TrainerSpec
from engine.backends.device import pick_device
from engine.backends.optimizer import same_kind
from engine.backends.trainers import build_trainer
from engine.backends.weights import load_folder, save_folder, weights_sha256
from engine.batch import Batch, micro_batches, restore
from engine.config import OptimizerConfig
from engine.controller.dispatch import ONE_TO_ALL, ONE_TO_FIRST, dispatch
from engine.controller.worker import Worker, WorkerContext
from engine.metrics import Metrics
from engine.seeds import derive
from engine.writing import writing

SEQUENCE = ("input_ids", "attention_mask", "prompt_lengths", "response_lengths", "response_mask")


def optimizer_file(folder: Path) -> Path:
    """Where the optimiser state of the model saved in `folder` lies: beside it."""
    return folder.with_name(f"{folder.name}_optimizer.safetensors")


class TrainedWorker(Worker):
    """One rank of a model with an optimiser. `load` must come before any other call."""

    head = "lm"

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._trainer: Trainer | None = None
        self._optimizer: OptimizerConfig | None = None

    @property
    def trainer(self) -> Trainer:
        """The loaded trainer."""
        if self._trainer is None:
            raise RuntimeError(f"{self.context.role} was called before load()")
        return self._trainer

    @dispatch(ONE_TO_ALL)
    def load(self, folder: str, init: str, optimizer: OptimizerConfig | None, total_steps: int) -> None:
        """Take weights from a Hugging Face folder (init "random": from the run seed) and begin this schedule."""
        config = self.context.config
        model = config.model.model_copy(update={"init": init})
        if self._trainer is None or init == "random" or not self._fits(optimizer):
            self._trainer = None  # its memory is free before the next one takes some
            self._trainer = build_trainer(
                TrainerSpec(
                    head=self.head,
                    model=model,
                    source=Path(folder),
                    train=config.train,
                    optimizer=optimizer,
                    total_steps=total_steps,
                    seed=derive(config.seed, "init", self.context.role),
                    rank=self.context.rank,
                    world_size=self.context.world_size,
                    device=pick_device(),
                )
            )
        else:
            self._trainer.load_weights(load_folder(Path(folder)))
            if optimizer is not None:
                self._trainer.reset_optimizer(optimizer, total_steps)
        self._optimizer = optimizer

    def _fits(self, optimizer: OptimizerConfig | None) -> bool:
        """Whether the present trainer can go on with this optimiser."""
        before = self._optimizer
        return before is optimizer is None or (
            before is not None and optimizer is not None and same_kind(before, optimizer)
        )

    @dispatch(ONE_TO_ALL)
    def load_optimizer(self, file: str) -> None:
        """Continue the schedule from a saved optimiser state."""
        self.trainer.load_optimizer_state(load_file(file))

    @dispatch(ONE_TO_ALL)
    def scale_rate(self, scale: float) -> None:
        """Multiply the schedule's rates with this from now on, until the next `load`."""
        self.trainer.scale_rate(scale)

    @dispatch(ONE_TO_FIRST)
    def save(self, folder: str, source: str, with_optimizer: bool) -> dict[str, Any]:
        """Write a complete Hugging Face folder and, beside it, the optimiser state; returns {"sha256", "steps"}."""
        weights = self.trainer.weights()
        state = self.trainer.optimizer_state() if with_optimizer else {}
        if self.context.rank != 0:
            return {}
        target = Path(folder)
        with writing(target):
            save_folder(weights, Path(source), target, head=self.head)
        if with_optimizer:
            with writing(optimizer_file(target)):
                save_file(state, optimizer_file(target))
        return {"sha256": weights_sha256(weights), "steps": self.trainer.steps}

    def _score(self, batch: Batch, read: Callable[[Tensor, Batch], Tensor], shape: tuple[int, ...]) -> Tensor:
        """read(model output, part) of every micro-batch, back in the batch's order."""
        parts = list(micro_batches(batch, self.context.config.train.micro_batch_tokens))
        outputs = self.trainer.score([part for _, part in parts], read)
        return restore([(rows, output) for (rows, _), output in zip(parts, outputs, strict=True)], shape)

    def _learn(self, batch: Batch, loss: Callable[..., Loss], normalizers: Sequence[float]) -> list[Metrics]:
        """One optimiser step per mini-batch and epoch, metrics of each; normalizers: each mini-batch's loss denominator
        over ranks."""
        done = []
        for _ in range(self.context.config.train.epochs):
            for number, normalizer in enumerate(normalizers):
                done.append(self.trainer.step(self._parts(batch, number), partial(loss, normalizer=normalizer)))
        return done

    def _parts(self, batch: Batch, number: int) -> list[Batch]:
        """Micro-batches of the rows that an optimiser step learns from."""
        rows = torch.nonzero(batch.mini_batch == number).flatten()
        return [part for _, part in micro_batches(batch.index(rows), self.context.config.train.micro_batch_tokens)]
