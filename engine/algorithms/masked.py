"""Reductions that look only where the mask is True, and the form in which losses hand back their numbers.

Everything is computed in float32; float64 input stays float64 so that tests can check gradients tightly.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import ShapeError

# exp(20) is 4.9e8: far from overflow in float32 even when squared, and far beyond every clip range in use.
LOG_RATIO_LIMIT = 20.0

Metric = tuple[Tensor, Tensor]
"""One number and its weight, both 0-dim and detached.

The name says how metrics of micro-batches and ranks combine: `..._max` by maximum over those with weight 1 (all maxima
here are of quantities that are never negative), `..._count` by sum (weight 1), every other name by the weighted mean,
which is exact. Weight 0 means that there was nothing to look at: the value then says nothing, and a combined weight of
0 is missing (NaN), not 0.
"""


@dataclass(frozen=True)
class LossOutput:
    """A scalar loss with its graph, and detached metrics by name (see Metric for how they combine)."""

    loss: Tensor
    metrics: dict[str, Metric]


def as_float(x: Tensor) -> Tensor:
    """The dtype that all maths here runs in: float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def check_mask(mask: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Raises ShapeError unless the mask is bool and every named tensor has its shape."""
    if mask.dtype != torch.bool:
        raise ShapeError(f"the mask must be bool, found {mask.dtype}.", remedy="Build it from recorded lengths.")
    wrong = {name: tuple(x.shape) for name, x in tensors.items() if x.shape != mask.shape}
    if wrong:
        raise ShapeError(
            f"every tensor must have the shape of the mask {tuple(mask.shape)}, found {wrong}.",
            remedy="Slice and pad all fields of a batch together.",
        )


def safe_divide(total: Tensor, denominator: Tensor | float) -> Tensor:
    """total / denominator, where 0 elements count as 1: an empty sum over no elements is 0 with gradient 0."""
    divisor = torch.as_tensor(denominator, dtype=total.dtype, device=total.device)
    return total / torch.where(divisor == 0, torch.ones_like(divisor), divisor)


def keep(x: Tensor, mask: Tensor) -> Tensor:
    """x where the mask is True, else 0, whatever stood there (NaN included); the gradient outside is exactly 0."""
    x = as_float(x)
    return torch.where(mask, x, torch.zeros_like(x))


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of the True entries over one dimension, or over all of them. Shapes of x and mask must agree (ShapeError)."""
    check_mask(mask, {"x": x})
    kept = keep(x, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the True entries over one dimension, or over all of them; 0 where there is no True entry."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return safe_divide(masked_sum(x, mask, dim), count)


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """x with mean 0 and standard deviation 1 (n-1) over all True entries; 0 outside the mask.

    Entries that are all equal, or fewer than two, give exact zeros. 1e-8 is added to the variance, so that a spread
    which is only rounding noise is not blown up to 1.
    """
    check_mask(mask, {"x": x})
    x = keep(x, mask)
    chosen = x[mask]
    if chosen.numel() < 2 or bool((chosen == chosen[0]).all()):
        return torch.zeros_like(x)
    return keep((x - chosen.mean()) * torch.rsqrt(chosen.var() + 1e-8), mask)


def scored_mask(scores: Tensor, response_mask: Tensor) -> Tensor:
    """response_mask [B, R] without the rows whose score [B] is NaN or infinite: what may be learnt from."""
    return response_mask & torch.isfinite(scores)[:, None]


def mean_metric(x: Tensor, mask: Tensor) -> Metric:
    """Mean over the True entries, weighted by their number."""
    kept = as_float(x).detach()
    return masked_mean(kept, mask), mask.sum().to(kept.dtype)


def max_metric(x: Tensor, mask: Tensor) -> Metric:
    """Largest True entry of a quantity that is never negative; weight 1, or 0 if there is no True entry."""
    kept = keep(x.detach(), mask).flatten()
    return torch.cat([kept, kept.new_zeros(1)]).max(), mask.any().to(kept.dtype)
