"""The plainest training there is, written from its definition: one process, whole batches, one tensor at a time."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from engine.backends.base import TrainerSpec
from engine.batch import Batch
from engine.config import OptimizerConfig


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
    """Token-mean likelihood in float32: linear warm-up, linear decay, clipping of the global norm."""
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
                update = UPDATES[spec.optimizer.optimizer]
                update(parameter, parameter.grad * scale, first[name], second[name], step + 1, rate, spec)
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
    """Loshchilov and Hutter 2019, algorithm 2, the decoupled line."""
    assert spec.optimizer is not None
    weight.sub_(rate * spec.optimizer.weight_decay * weight)
    _adam_step(weight, gradient, first, second, count, rate, spec.optimizer)


def _adam(
    weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, count: int, rate: float, spec: TrainerSpec
) -> None:
    """Kingma and Ba 2015, algorithm 1, of the loss plus a quadratic penalty."""
    assert spec.optimizer is not None
    _adam_step(weight, gradient + spec.optimizer.weight_decay * weight, first, second, count, rate, spec.optimizer)


def _adam_step(
    weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, count: int, rate: float, options: OptimizerConfig
) -> None:
    beta1, beta2 = options.betas
    first.mul_(beta1).add_(gradient * (1 - beta1))
    second.mul_(beta2).add_(gradient**2 * (1 - beta2))
    mean, variance = first / (1 - beta1**count), second / (1 - beta2**count)
    weight.sub_(rate * mean / (variance.sqrt() + options.eps))


def _rmsprop(
    weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, count: int, rate: float, spec: TrainerSpec
) -> None:
    """Tieleman and Hinton 2012, with heavy-ball momentum."""
    options = spec.optimizer
    assert options is not None
    gradient = gradient + options.weight_decay * weight
    second.copy_(options.alpha * second + (1 - options.alpha) * gradient**2)
    first.copy_(options.momentum * first + gradient / (second.sqrt() + options.eps))
    weight.sub_(rate * first)


def _sgd(
    weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, count: int, rate: float, spec: TrainerSpec
) -> None:
    """Gradient descent with momentum, looking ahead with nesterov (Sutskever et al. 2013)."""
    options = spec.optimizer
    assert options is not None
    gradient = gradient + options.weight_decay * weight
    first.copy_(options.momentum * first + gradient)
    weight.sub_(rate * (gradient + options.momentum * first if options.nesterov else first))


UPDATES = {"adamw": _adamw, "adam": _adam, "rmsprop": _rmsprop, "sgd": _sgd}
