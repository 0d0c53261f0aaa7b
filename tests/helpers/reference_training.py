"""The plainest training there is, written from its definition: one process, whole batches, one tensor at a time."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from engine.backends.base import TrainerSpec
from engine.batch import Batch


@dataclass
class Reference:
    """What training in one go gave."""

    metrics: list[dict[str, float]]
    weights: dict[str, Tensor]
    model: LlamaForCausalLM

    def score(self, batch: Batch) -> Tensor:
        """[B, R] log-probabilities of the response tokens, 0 where there is none; row by row without padding."""
        scores = torch.zeros(batch.response_mask.shape)
        with torch.no_grad():
            for row in range(len(batch)):
                losses = _row_losses(self.model, batch, row)
                scores[row, : len(losses)] = -losses
        return scores


def train_in_one_go(source: Path, batches: list[Batch], spec: TrainerSpec) -> Reference:
    """Token-mean likelihood by AdamW in float32: linear warm-up, linear decay, clipping of the global norm."""
    assert spec.optimizer is not None and spec.optimizer.schedule == "linear"
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    parameters = dict(model.named_parameters())
    first, second = ({name: torch.zeros_like(p) for name, p in parameters.items()} for _ in range(2))
    metrics = []
    for step, batch in enumerate(batches):
        model.zero_grad()
        rows = [_row_losses(model, batch, row) for row in range(len(batch))]
        losses = torch.cat(rows)
        losses.mean().backward()
        norm = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in parameters.values() if p.grad is not None))
        rate = _rate(step, spec)
        scale = min(1.0, spec.optimizer.max_grad_norm / (norm + 1e-6))
        with torch.no_grad():
            for name, parameter in parameters.items():
                assert parameter.grad is not None
                _adamw(parameter, parameter.grad * scale, first[name], second[name], step + 1, rate, spec)
        metrics.append(
            {
                "policy/nll": float(losses.detach().mean()),
                "policy/nll_max": float(losses.detach().max()),
                "train/grad_norm": norm,
                "train/lr": rate,
            }
        )
    return Reference(metrics, {name: p.detach() for name, p in parameters.items()}, model)


def _row_losses(model: LlamaForCausalLM, batch: Batch, row: int) -> Tensor:
    prompt, response = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
    ids = batch.input_ids[row : row + 1, : prompt + response]
    logits = model(ids).logits[0, prompt - 1 : prompt + response - 1]
    return torch.nn.functional.cross_entropy(logits, ids[0, prompt:], reduction="none")


def _rate(step: int, spec: TrainerSpec) -> float:
    assert spec.optimizer is not None
    warmup = spec.optimizer.warmup_steps
    if step < warmup:
        return spec.optimizer.lr * (step + 1) / warmup
    return spec.optimizer.lr * (spec.total_steps - step) / (spec.total_steps - warmup)


def _adamw(
    weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, count: int, rate: float, spec: TrainerSpec
) -> None:
    """Loshchilov and Hutter 2019, algorithm 2."""
    assert spec.optimizer is not None
    beta1, beta2 = spec.optimizer.betas
    first.mul_(beta1).add_(gradient * (1 - beta1))
    second.mul_(beta2).add_(gradient**2 * (1 - beta2))
    mean, variance = first / (1 - beta1**count), second / (1 - beta2**count)
    weight.sub_(rate * spec.optimizer.weight_decay * weight)
    weight.sub_(rate * mean / (variance.sqrt() + spec.optimizer.eps))
