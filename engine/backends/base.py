"""What every training and every rollout backend offers; workers know only this file."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.batch import Batch
from engine.config import EngineConfig, ModelConfig, OptimizerConfig
from engine.errors import HybridFlowError
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

    head: str  # "lm": output logits [b, T, V]; "value" and "score": output values or scores [b, T] float32
    model: ModelConfig
    source: Path  # local Hugging Face folder (config.json; weights unless model.init is random)
    train: EngineConfig
    optimizer: OptimizerConfig | None  # None = frozen, no optimiser state
    total_steps: int  # optimiser steps of the whole run, for the schedule
    seed: int
    rank: int
    world_size: int
    device: torch.device


class Trainer(ABC):
    """One model under one training backend on this rank; all ranks call every method together."""

    spec: TrainerSpec

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
    def adapt_rate(self, kl: float) -> None:
        """Schedule adaptive_kl: tell how far the policy has moved (nats per token); the next steps have another rate."""

    @abstractmethod
    def scale_rate(self, scale: float) -> None:
        """Multiply the rates of the schedule with this until the next reset; it is no part of the optimiser state."""

    @abstractmethod
    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Full weights by Hugging Face name, one after the other, on the trainer's device, in model.dtype, on every rank.

        All ranks go through it together. A tensor may be the module's own: it holds these values until the next step or
        load. Of tied tensors only the first is there, as in saved folders.
        """

    def weights(self) -> dict[str, Tensor]:
        """A snapshot of them, contiguous on the CPU, which later steps do not change; only rank 0 gets it, others {}."""
        snapshot = {}
        for name, tensor in self.stream():
            if self.spec.rank == 0:
                snapshot[name] = tensor.to("cpu", copy=True).contiguous()
        return snapshot

    @abstractmethod
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all weights; every rank gives the full set. StoreError on missing, extra or misshapen names."""

    @abstractmethod
    def optimizer_state(self) -> dict[str, Tensor]:
        """Full optimiser state whatever the layout; only rank 0 gets it, others {}.

        `PARAM/KIND` for every kind of the optimiser (`exp_avg`, `exp_avg_sq` of adamw and adam; `square_avg` of rmsprop;
        `momentum_buffer` with momentum), `PARAM/master` (float32 weights, where model.dtype is not float32), `step`
        (0-dim int64) and, of schedule adaptive_kl, `rate` (0-dim float64).
        """

    @abstractmethod
    def load_optimizer_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue exactly where `optimizer_state` was taken, on any number of ranks; load the weights first.

        Every rank gives the full set. StoreError on missing, extra or misshapen names.
        """

    @abstractmethod
    def reset_optimizer(self, optimizer: OptimizerConfig, total_steps: int) -> None:
        """Forget moments and step count and start this schedule (between supervised and reinforcement stages).

        Another optimiser, or one with other moments, needs another trainer (optimizer.same_kind).
        """

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
    top_p: float
    top_k: int
    stop: tuple[str, ...]
    kv_cache_gib: int
    gpu_memory_utilization: float
    max_batched_tokens: int | None
    tensor_parallel: int
    max_batch: int  # most samples of one call
    shares_gpu: bool  # trainers compute on the same GPU, so the engine sleeps while they do
    transport: str = "file"  # how weights come to it (engine.controller.layout.Transport)


@dataclass(frozen=True)
class Completion:
    """One sampled response: exactly the sampled ids, first EOS included, and their log-probabilities under the sampler."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # at the sampling temperature; same length as token_ids
    finish_reason: int  # 0 stop, 1 length


Finished = Callable[[int, Completion], None]  # (number of the prompt, its response)


def unheard(row: int, response: Completion) -> None:
    """For callers that wait for all responses."""


class RolloutEngine(ABC):
    """A generation engine on this rank."""

    @abstractmethod
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Serve these weights from now on and forget every cached prefix; TransientError if the cache was not reset."""

    def join_senders(self, init: Mapping[str, Any]) -> None:
        """Get ready for weights that come over the spec's transport; init: what the library's own engine wants to know."""
        raise self._refusal()

    def load_sent(self, update: Mapping[str, Any], *, version: int) -> list[dict[str, int]]:
        """As `load_weights`, of weights being sent; the checksums of what arrived on each of the engine's devices."""
        raise self._refusal()

    def _refusal(self) -> HybridFlowError:
        return HybridFlowError(
            f"{type(self).__name__} was sent weights; it takes them from a file alone.",
            remedy="engine.controller.layout.transport decides how weights travel.",
        )

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        *,
        temperature: float,
        max_tokens: int,
        finished: Finished = unheard,
    ) -> list[Completion]:
        """One response per prompt, in order, each depending only on weights, prompt and its own seed; temperature 0 = greedy.

        finished: called in this thread with every response as soon as it has its last token.
        """

    @abstractmethod
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability (temperature 1) of every token but the first, given those before it: the weight probe."""

    def sleep(self) -> bool:
        """Give the memory of a shared GPU back to the trainers; True if the weights went with it. Others have none to give."""
        return False

    def wake(self) -> None:  # noqa: B027 - most engines have nothing to take
        """Take that memory again, before weights are loaded. Raises ConfigError if the trainers hold too much of it."""

    @abstractmethod
    def close(self) -> None:
        """Release memory and threads."""
