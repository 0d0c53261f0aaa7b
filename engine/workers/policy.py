"""Policy: the trained language model; scores responses, learns from them, hands its weights to the rollout engine."""

from pathlib import Path

import torch
from torch import Tensor

from engine.algorithms.kl import kl_estimate
from engine.algorithms.logprobs import token_logprobs, token_logprobs_and_entropy
from engine.algorithms.losses import LossOutput, aggregate, entropy_loss, policy_loss, sft_loss
from engine.algorithms.masked import mean_metric
from engine.backends.weight_sync import WeightHandle, publish
from engine.batch import Batch, micro_batches, response_ids, response_positions
from engine.config import GRPOConfig
from engine.controller.dispatch import DP, DP_TO_FIRST, ONE_TO_FIRST, dispatch
from engine.metrics import Metrics
from engine.workers.trained import SEQUENCE, TrainedWorker

LEARNS_FROM = (*SEQUENCE, "old_logprobs", "advantages", "rollout_weights", "mini_batch")


class PolicyWorker(TrainedWorker):
    """One rank of the policy."""

    head = "lm"

    @dispatch(DP, reads=SEQUENCE)
    def compute_logprobs(self, batch: Batch) -> Batch:
        """old_logprobs [B, R]: log-probabilities of the responses under the present weights, sampling temperature."""
        logprobs = self._score(batch, self._logprobs, tuple(batch.response_mask.shape))
        return Batch({"old_logprobs": logprobs})

    @dispatch(DP_TO_FIRST)
    def update(self, batch: Batch, normalizers: list[float]) -> Metrics:
        """All optimiser steps of one iteration; normalizers: loss denominator of each mini-batch over all ranks."""
        return self._learn(batch, self._policy_loss, normalizers)

    @dispatch(DP_TO_FIRST)
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
    def probe(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probability (temperature 1) of every token but the first of each sequence, for the engine to match."""
        batch = _as_responses(sequences)
        scored = self.trainer.score([batch], lambda output, part: _response_logprobs(output, part, 1.0))
        return [row[: len(ids) - 1].tolist() for row, ids in zip(scored[0], sequences, strict=True)]

    def _logprobs(self, logits: Tensor, part: Batch) -> Tensor:
        return _response_logprobs(logits, part, self.context.config.rollout.temperature)

    def _policy_loss(self, logits: Tensor, part: Batch, normalizer: float) -> LossOutput:
        config = self.context.config
        algorithm, mask = config.algorithm, part.response_mask
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
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
            weights=part.rollout_weights,
            aggregation=algorithm.aggregation,
            normalizer=normalizer,
        )
        loss, metrics = output.loss, dict(output.metrics)
        if entropy is not None:
            bonus = entropy_loss(entropy, mask, aggregation=algorithm.aggregation, normalizer=normalizer)
            loss, metrics = loss + algorithm.entropy_coef * bonus.loss, metrics | dict(bonus.metrics)
        if isinstance(algorithm, GRPOConfig) and algorithm.kl_loss_coef > 0:
            kl = kl_estimate(logprobs, part.ref_logprobs, algorithm.kl_loss_kind, response_mask=mask)
            loss = loss + algorithm.kl_loss_coef * aggregate(kl, mask, algorithm.aggregation, normalizer=normalizer)
            metrics["policy/ref_kl"] = mean_metric(kl, mask)
        return LossOutput(loss, metrics)

    def _sft_loss(self, logits: Tensor, part: Batch, normalizer: float) -> LossOutput:
        return sft_loss(_response_logprobs(logits, part, 1.0), part.response_mask, normalizer=normalizer)


def _at_responses(logits: Tensor, part: Batch) -> tuple[Tensor, Tensor]:
    """Logits [b, R, V] that predict the response tokens, and those tokens [b, R]."""
    positions = response_positions(part)[..., None].expand(-1, -1, logits.shape[-1])
    return logits.gather(1, positions), response_ids(part)


def _response_logprobs(logits: Tensor, part: Batch, temperature: float) -> Tensor:
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
