"""What every training and every rollout backend offers; workers know only this file."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from engine.batch import Batch
from engine.config import ModelConfig, OptimizerConfig, TrainConfig
from engine.metrics import Metrics


class Loss(Protocol):
    """What a loss function returns: engine.algorithms.losses.LossOutput fits."""

    @property
    def loss(self) -> Tensor:
        """0-dim, this part's share of the optimiser step's loss (parts add up)."""

    @property
    def metrics(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Name -> (value, weight)."""


LossFunction = Callable[[Tensor, Batch], Loss]  # (model output [b, T, V] or values [b, T], micro-batch) -> loss
Reader = Callable[[Tensor, Batch], Tensor]  # (the same) -> what is kept of it, such as log-probabilities [b, R]


@dataclass(frozen=True)
class TrainerSpec:
    """Everything a rank needs to build one trainable or frozen model."""

    head: str  # "lm": output logits [b, T, V]; "value": output values [b, T] float32
    model: ModelConfig
    source: Path  # local Hugging Face folder (config.json; weights unless model.init is random)
    train: TrainConfig
    optimizer: OptimizerConfig | None  # None = frozen, no optimiser state
    total_steps: int  # optimiser steps of the whole run, for the schedule
    seed: int
    rank: int
    world_size: int
    device: torch.device


class Trainer(ABC):
    """One model under one training backend on this rank; all ranks call every method together."""

    @abstractmethod
    def score(self, parts: Sequence[Batch], read: Reader) -> list[Tensor]:
        """What `read` makes of every part's output, on the CPU, in order; without gradient and without dropout.

        parts: this rank's micro-batches, possibly none; ranks may hold different numbers of them.
        """

    @abstractmethod
    def step(self, parts: Sequence[Batch], loss: LossFunction) -> Metrics:
        """One optimiser step over all parts of all ranks: gradients add up, are clipped, then applied.

        parts: this rank's micro-batches, possibly none; ranks may hold different numbers of them.
        Returns the loss metrics combined over parts and ranks plus train/grad_norm and train/lr.
        Raises DivergedError, before parameters are touched, if the gradient norm is not finite.
        """

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Full weights by Hugging Face name, contiguous on the CPU, in model.dtype; only rank 0 gets them, others {}.

        Of tied tensors only the first is there, as in saved folders.
        """

    @abstractmethod
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all weights; every rank gives the full set. StoreError on missing, extra or misshapen names."""

    @abstractmethod
    def optimizer_state(self) -> dict[str, Tensor]:
        """Full optimiser state whatever the layout; only rank 0 gets it, others {}.

        `PARAM/exp_avg`, `PARAM/exp_avg_sq`, `PARAM/master` (float32 weights, where model.dtype is not float32) and
        `step` (0-dim int64).
        """

    @abstractmethod
    def load_optimizer_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue exactly where `optimizer_state` was taken, on any number of ranks; load the weights first.

        Every rank gives the full set. StoreError on missing, extra or misshapen names.
        """

    @abstractmethod
    def reset_optimizer(self, optimizer: OptimizerConfig, total_steps: int) -> None:
        """Forget moments and step count and start this schedule (between supervised and reinforcement stages)."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Optimiser steps applied so far since the last reset."""


@dataclass(frozen=True)
class RolloutSpec:
    """Everything a rollout engine needs; weights come later through `load_weights`."""

    source: Path  # local Hugging Face folder with config and tokenizer
    dtype: str
    max_prompt_tokens: int
    max_response_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[str, ...]
    kv_cache_gib: int
    gpu_memory_utilization: float
    max_batched_tokens: int | None
    tensor_parallel: int
    max_batch: int  # most samples of one call


@dataclass(frozen=True)
class Completion:
    """One sampled response: exactly the sampled ids, first EOS included, and their log-probabilities under the sampler."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # at the sampling temperature; same length as token_ids
    finish_reason: int  # 0 stop, 1 length


class RolloutEngine(ABC):
    """A generation engine on this rank."""

    @abstractmethod
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Serve these weights from now on and forget every cached prefix; TransientError if the cache was not reset."""

    @abstractmethod
    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, temperature: float, max_tokens: int
    ) -> list[Completion]:
        """One response per prompt, in order, each depending only on weights, prompt and its own seed; temperature 0 = greedy."""

    @abstractmethod
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability (temperature 1) of every token but the first, given those before it: the weight probe."""

    @abstractmethod
    def close(self) -> None:
        """Release memory and threads."""
