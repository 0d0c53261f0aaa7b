"""Policy: the trained language model; scores responses, learns from them, hands its weights to the rollout engine."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.algorithms.kl import kl_estimate
from engine.algorithms.logprobs import token_logprobs, token_logprobs_and_entropy
from engine.algorithms.losses import LossOutput, aggregate, entropy_loss, policy_loss, sft_loss
from engine.algorithms.masked import mean_metric
from engine.backends.transfer import Manifest, describe
from engine.backends.transfer_broadcast import Endpoint, Sender, listen
from engine.backends.transfer_ipc import Exported, Exporter
from engine.backends.weight_sync import WeightHandle, carry, publish, retract
from engine.batch import Batch, micro_batches, response_ids, response_positions
from engine.config import KLLossConfig, RunConfig
from engine.controller.dispatch import ONE_TO_ALL, ONE_TO_FIRST, ROWS, ROWS_TO_FIRST, dispatch
from engine.controller.worker import WorkerContext
from engine.metrics import Metrics, merge
from engine.workers.trained import SEQUENCE, TrainedWorker

LEARNS_FROM = (*SEQUENCE, "old_logprobs", "advantages", "rollout_weights", "mini_batch")


def learns_from(config: RunConfig) -> tuple[str, ...]:
    """The fields that `PolicyWorker.update` reads with these options."""
    algorithm = config.algorithm
    reference = isinstance(algorithm, KLLossConfig) and algorithm.kl_loss_coef > 0
    return (*LEARNS_FROM, "ref_logprobs") if reference else LEARNS_FROM


class PolicyWorker(TrainedWorker):
    """One rank of the policy."""

    head = "lm"

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._exporter: Exporter | None = None
        self._sender: Sender | None = None

    @dispatch(ROWS, reads=SEQUENCE)
    def compute_logprobs(self, batch: Batch) -> Batch:
        """old_logprobs [B, R]: log-probabilities of the responses under the present weights, sampling temperature."""
        logprobs = self._score(batch, self._logprobs, tuple(batch.response_mask.shape))
        return Batch({"old_logprobs": logprobs})

    @dispatch(ROWS_TO_FIRST)
    def update(self, batch: Batch, normalizers: list[float]) -> Metrics:
        """All optimiser steps of one iteration; normalizers: loss denominator of each mini-batch over all ranks."""
        return self._adapted(self._learn(batch, self._policy_loss, normalizers))

    @dispatch(ROWS_TO_FIRST)
    def update_with_demonstrations(
        self, batch: Batch, normalizers: list[float], demonstrations: Batch, tokens: list[float]
    ) -> Metrics:
        """The same, and in every step the likelihood of supervised rows, weighted with algorithm.ptx_coef; tokens: their
        completion tokens of each mini-batch over all ranks."""
        steps = []
        for _ in range(self.context.config.train.epochs):
            for number, (normalizer, count) in enumerate(zip(normalizers, tokens, strict=True)):
                parts = [*self._parts(batch, number), *self._parts(demonstrations, number)]
                loss = partial(self._loss_of_either, normalizer=normalizer, tokens=count)
                steps.append(self.trainer.step(parts, loss))
        return self._adapted(steps)

    @dispatch(ROWS_TO_FIRST)
    def update_sft(self, batch: Batch, normalizer: float) -> Metrics:
        """One supervised step on prompt and completion rows; normalizer: completion tokens over all ranks."""
        parts = [part for _, part in micro_batches(batch, self.context.config.train.micro_batch_tokens)]
        return self.trainer.step(parts, lambda output, part: self._sft_loss(output, part, normalizer))

    @dispatch(ONE_TO_FIRST)
    def publish(self, folder: str, version: int) -> WeightHandle | None:
        """Put the present weights where rollout engines of this host can read them."""
        weights = self.trainer.weights()
        return publish(weights, Path(folder), version) if self.context.rank == 0 else None

    @dispatch(ONE_TO_FIRST)
    def carry(self, handle: WeightHandle) -> Any:
        """What was published, as an array of bytes for engines on other hosts."""
        return carry(handle) if self.context.rank == 0 else None

    @dispatch(ONE_TO_ALL)
    def retract(self, handle: WeightHandle) -> None:
        """Give the memory of what was published back."""
        if self.context.rank == 0:
            retract(handle)

    @dispatch(ONE_TO_ALL)
    def export(self, version: int) -> Exported:
        """Hold the present weights where engines on this rank's GPU can map them, until `release`."""
        self._exporter = Exporter(self.trainer.stream(), version)
        return self._exporter.exported

    @dispatch(ONE_TO_ALL)
    def release(self) -> None:
        """Engines have loaded what was exported."""
        if self._exporter is not None:
            self._exporter.release()
        self._exporter = None

    @dispatch(ONE_TO_FIRST)
    def listen(self, engines: int) -> Endpoint | None:
        """Where engines will find the sender of broadcasts, rank 0."""
        return listen(engines, self.context.config.rollout.tensor_parallel) if self.context.rank == 0 else None

    @dispatch(ONE_TO_ALL)
    def join_broadcast(self, endpoint: Endpoint) -> None:
        """Enter the group of the sender and all engines; waits for all of them."""
        self._sender = Sender(endpoint) if self.context.rank == 0 else None

    @dispatch(ONE_TO_FIRST)
    def describe(self, version: int) -> Manifest:
        """What a broadcast of the present weights will send."""
        return describe(self.trainer.stream(), version)

    @dispatch(ONE_TO_ALL)
    def broadcast(self) -> None:
        """Send the present weights to all engines; other ranks only help to put them together."""
        if self._sender is not None:
            self._sender.send(self.trainer.stream())
        else:
            for _ in self.trainer.stream():
                pass

    @dispatch(ONE_TO_FIRST)
    def probe(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probability (temperature 1) of every token but the first of each sequence, for the engine to match."""
        batch = _as_responses(sequences)
        scored = self.trainer.score([batch], lambda output, part: response_logprobs(output, part, 1.0))
        return [row[: len(ids) - 1].tolist() for row, ids in zip(scored[0], sequences, strict=True)]

    def _adapted(self, steps: list[Metrics]) -> Metrics:
        if self.context.config.train.schedule == "adaptive_kl":
            measured = [kl for step in steps if not math.isnan(kl := step["policy/approx_kl"])]
            if measured:  # a step whose samples all have no score sees nothing of the policy
                self.trainer.adapt_rate(measured[-1])
        return merge(steps)

    def _loss_of_either(self, logits: Tensor, part: Batch, normalizer: float, tokens: float) -> LossOutput:
        if "advantages" in part:
            return self._policy_loss(logits, part, normalizer)
        output = self._sft_loss(logits, part, tokens)
        return LossOutput(self.context.config.algorithm.ptx_coef * output.loss, output.metrics)

    def _logprobs(self, logits: Tensor, part: Batch) -> Tensor:
        return response_logprobs(logits, part, self.context.config.rollout.temperature)

    def _policy_loss(self, logits: Tensor, part: Batch, normalizer: float) -> LossOutput:
        config = self.context.config
        algorithm, mask = config.algorithm, part.response_mask
        options = algorithm.policy_loss_options
        share = {"aggregation": options["aggregation"], "normalizer": normalizer}
        chosen, targets = _at_responses(logits, part)
        if algorithm.entropy_coef > 0:
            logprobs, entropy = token_logprobs_and_entropy(chosen, targets, temperature=config.rollout.temperature)
        else:
            logprobs, entropy = token_logprobs(chosen, targets, temperature=config.rollout.temperature), None
        output = policy_loss(
            logprobs,
            part.old_logprobs,
            part.advantages,
            mask,
            weights=part.rollout_weights,
            normalizer=normalizer,
            **options,
        )
        loss, metrics = output.loss, dict(output.metrics)
        if entropy is not None:
            bonus = entropy_loss(entropy, mask, **share)
            loss, metrics = loss + algorithm.entropy_coef * bonus.loss, metrics | dict(bonus.metrics)
        if isinstance(algorithm, KLLossConfig) and algorithm.kl_loss_coef > 0:
            kl = kl_estimate(logprobs, part.ref_logprobs, algorithm.kl_loss_kind, response_mask=mask)
            loss = loss + algorithm.kl_loss_coef * aggregate(kl, mask, options["aggregation"], normalizer=normalizer)
            metrics["policy/ref_kl"] = mean_metric(kl, mask)
        return LossOutput(loss, metrics)

    def _sft_loss(self, logits: Tensor, part: Batch, normalizer: float) -> LossOutput:
        return sft_loss(response_logprobs(logits, part, 1.0), part.response_mask, normalizer=normalizer)


def _at_responses(logits: Tensor, part: Batch) -> tuple[Tensor, Tensor]:
    """Logits [b, R, V] that predict the response tokens, and those tokens [b, R]."""
    positions = response_positions(part)[..., None].expand(-1, -1, logits.shape[-1])
    return logits.gather(1, positions), response_ids(part)


def response_logprobs(logits: Tensor, part: Batch, temperature: float) -> Tensor:
    """[b, R] float32 log-probabilities of the response tokens, 0 where masked."""
    chosen, targets = _at_responses(logits, part)
    return torch.where(part.response_mask, token_logprobs(chosen, targets, temperature=temperature), 0.0)


def _as_responses(sequences: list[list[int]]) -> Batch:
    """Sequences as batches whose prompt is the first token and whose response is the rest."""
    lengths = torch.tensor([len(ids) for ids in sequences])
    width = int(lengths.max())
    ids = torch.zeros(len(sequences), width, dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
    return Batch(
        {
            "input_ids": ids,
            "attention_mask": torch.arange(width) < lengths[:, None],
            "prompt_lengths": torch.ones_like(lengths),
            "response_lengths": lengths - 1,
            "response_mask": torch.arange(width - 1) < (lengths - 1)[:, None],
        }
    )
