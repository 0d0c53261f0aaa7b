"""Log-probabilities and entropies of tokens from logits, in float32, a slice of tokens at a time.

A [tokens, vocabulary] float32 copy of the logits is the largest tensor of an update. Here it never exists: forward and
backward each hold one slice of it, and the backward pass computes the slice again from the saved logits.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.algorithms.masked import as_float
from engine.errors import ShapeError

# 128 MiB of float32: enough to keep any device busy, little next to the logits themselves.
SLICE_ELEMENTS = 2**25


def token_logprobs(
    logits: Tensor, targets: Tensor, *, temperature: float, slice_elements: int = SLICE_ELEMENTS
) -> Tensor:
    """log softmax(logits / temperature) at the targets, float32 (float64 for float64), with gradient to logits.

    logits: [..., V], any float dtype; targets: [...] int64 in 0..V-1, also at padding; temperature > 0: the one the
    sampler used, or the ratio between both is not 1 for the same weights. The gradient has the dtype of logits; it can
    be taken once.
    Raises ShapeError if the shapes do not fit, ValueError if the temperature is not positive.
    """
    flat, flat_targets = _flatten(logits, targets, temperature)
    logprobs: Tensor = _TokenLogprobs.apply(flat, flat_targets, temperature, slice_elements)  # type: ignore[no-untyped-call]
    return logprobs.view(targets.shape)


def token_logprobs_and_entropy(
    logits: Tensor, targets: Tensor, *, temperature: float, slice_elements: int = SLICE_ELEMENTS
) -> tuple[Tensor, Tensor]:
    """token_logprobs, and the entropy (nats) of softmax(logits / temperature), both shaped like targets, with gradient.

    Vocabulary entries with logit -inf have probability 0 and add nothing to the entropy.
    """
    flat, flat_targets = _flatten(logits, targets, temperature)
    logprobs, entropy = _TokenLogprobsEntropy.apply(flat, flat_targets, temperature, slice_elements)  # type: ignore[no-untyped-call]
    return logprobs.view(targets.shape), entropy.view(targets.shape)


def _flatten(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    if logits.shape[:-1] != targets.shape or logits.dim() == 0:
        raise ShapeError(
            f"logits {tuple(logits.shape)} must have the shape of targets {tuple(targets.shape)} plus the vocabulary.",
            remedy="Shift the targets by one before, so that logits[t] predicts targets[t].",
        )
    if not temperature > 0:
        raise ValueError(
            f"temperature must be positive to score tokens, found {temperature}; 0 (greedy) is for evaluation."
        )
    return logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)


def _slices(num_tokens: int, vocabulary: int, slice_elements: int) -> Iterator[slice]:
    step = max(1, slice_elements // max(1, vocabulary))
    for start in range(0, num_tokens, step):
        yield slice(start, start + step)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return as_float(logits) / temperature


def _empty_like_targets(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.empty(targets.shape, dtype=as_float(logits[:0]).dtype, device=logits.device)


def _logprob_gradient(probabilities: Tensor, targets: Tensor, upstream: Tensor) -> Tensor:
    """upstream * (onehot(target) - p), the gradient to the scaled logits."""
    return (probabilities * -upstream[:, None]).scatter_add_(1, targets[:, None], upstream[:, None])


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float, slice_elements: int) -> Tensor:
        ctx.save_for_backward(logits, targets)
        ctx.temperature, ctx.slice_elements = temperature, slice_elements
        logprobs = _empty_like_targets(logits, targets)
        for rows in _slices(len(logits), logits.shape[1], slice_elements):
            scaled = _scaled(logits[rows], temperature)
            chosen = scaled.gather(1, targets[rows, None]).squeeze(1)
            logprobs[rows] = chosen - scaled.logsumexp(1)
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for rows in _slices(len(logits), logits.shape[1], ctx.slice_elements):
            probabilities = _scaled(logits[rows], ctx.temperature).softmax(1)
            gradient[rows] = _logprob_gradient(probabilities, targets[rows], upstream[rows]) / ctx.temperature
        return gradient, None, None, None


class _TokenLogprobsEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, slice_elements: int
    ) -> tuple[Tensor, Tensor]:
        ctx.temperature, ctx.slice_elements = temperature, slice_elements
        logprobs, entropy = _empty_like_targets(logits, targets), _empty_like_targets(logits, targets)
        for rows in _slices(len(logits), logits.shape[1], slice_elements):
            log_probabilities = _scaled(logits[rows], temperature).log_softmax(1)
            logprobs[rows] = log_probabilities.gather(1, targets[rows, None]).squeeze(1)
            entropy[rows] = torch.special.entr(log_probabilities.exp()).sum(1)
        ctx.save_for_backward(logits, targets, entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, upstream_entropy: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets, entropy = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for rows in _slices(len(logits), logits.shape[1], ctx.slice_elements):
            probabilities = _scaled(logits[rows], ctx.temperature).softmax(1)
            # dH/dz = -p (log p + H); entr(p) = -p log p is 0 where p is 0.
            of_entropy = torch.special.entr(probabilities) - probabilities * entropy[rows, None]
            of_logprob = _logprob_gradient(probabilities, targets[rows], upstream[rows])
            gradient[rows] = (of_logprob + of_entropy * upstream_entropy[rows, None]) / ctx.temperature
        return gradient, None, None, None
