"""Distance between the policy and its reference: estimators, their use in the reward, and who sets the coefficient."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.algorithms.masked import as_float, check_mask, keep
from engine.errors import ShapeError

# Beyond this many nats k3 goes on along its tangent: e^10 is the largest gradient one token can have.
K3_LIMIT = 10.0


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str, *, response_mask: Tensor | None = None) -> Tensor:
    """Estimate of KL(policy || reference) per token, nats, with gradient to logprobs (Schulman 2020).

    logprobs (policy), ref_logprobs: same shape; d = logprobs - ref_logprobs.
    kind: "k1" d (may be negative); "k2" d^2 / 2; "k3" exp(-d) + d - 1 (never negative); "abs" |d|.
    k3 is exact for d >= -10. Below, where the reference finds the token e^10 times as likely as the policy does, it
    goes on along its tangent: value and gradient stay finite for every finite d, and the policy is still pulled to the
    reference.
    response_mask: entries outside become 0 before exp, so that garbage there reaches neither value nor gradient. None =
    all entries count.
    """
    if logprobs.shape != ref_logprobs.shape:
        raise ShapeError(
            f"logprobs {tuple(logprobs.shape)} and ref_logprobs {tuple(ref_logprobs.shape)} differ in shape.",
            remedy="Score the same responses with both models.",
        )
    d = as_float(logprobs) - as_float(ref_logprobs).detach()
    if response_mask is not None:
        check_mask(response_mask, {"logprobs": d})
        d = keep(d, response_mask)
    if kind == "k1":
        return d
    if kind == "k2":
        return d * d / 2
    if kind == "k3":
        return _k3(-d)
    if kind == "abs":
        return d.abs()
    raise ValueError(f"kind must be one of 'k1', 'k2', 'k3', 'abs', found {kind!r}.")


def _k3(x: Tensor) -> Tensor:
    """exp(x) - 1 - x up to x = K3_LIMIT, then its tangent there."""
    near = x.clamp(max=K3_LIMIT)
    slope = torch.expm1(near).detach()
    # x - near is 0 on the exact side; the clamp takes away a negative rounding error next to x = 0.
    return (torch.expm1(near) - near + slope * (x - near)).clamp(min=0.0)


def shape_rewards(
    scores: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, response_mask: Tensor, kl_coef: float
) -> Tensor:
    """Token rewards [B, R]: -kl_coef * k1 at every token, the score at the last response token, 0 outside the mask.

    scores: [B], reward units; old_logprobs, ref_logprobs: [B, R], nats.
    An unscored sample (NaN or infinite score) gets NaN at its last token, never 0: gae and reinforce_plus_plus then
    give the whole row advantage 0, and masked.scored_mask keeps it out of whitening, losses and means.
    """
    check_mask(response_mask, {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs})
    if scores.shape != response_mask.shape[:1]:
        raise ShapeError(
            f"scores must be [B] = [{len(response_mask)}], found {tuple(scores.shape)}.",
            remedy="Give one score per sample.",
        )
    rewards = -kl_coef * kl_estimate(old_logprobs, ref_logprobs, "k1", response_mask=response_mask).detach()
    tokens_from_here = response_mask.flip(-1).cumsum(-1).flip(-1)
    last = response_mask & (tokens_from_here == 1)
    score = torch.where(torch.isfinite(scores), scores, torch.nan).detach().to(rewards.dtype)
    return torch.where(last, rewards + score[:, None], rewards)


@dataclass(frozen=True)
class FixedKL:
    """The same coefficient for the whole run. dataclasses.asdict gives its JSON form."""

    coef: float

    def updated(self, kl: float, num_samples: int) -> "FixedKL":
        return self


@dataclass(frozen=True)
class AdaptiveKL:
    """Coefficient that steers the mean KL of a sequence to a target (Ziegler et al. 2019, section 2.2).

    target: nats; horizon: samples over which a full correction of 20 % is made. dataclasses.asdict gives its JSON form.
    Raises ValueError unless both are positive.
    """

    coef: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        if not (self.target > 0 and self.horizon > 0):
            raise ValueError(f"KL target and horizon must be positive, found {self.target} and {self.horizon}.")

    def updated(self, kl: float, num_samples: int) -> "AdaptiveKL":
        """coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon), the last factor at most 1.

        A batch larger than the horizon would otherwise turn the coefficient negative. Raises ValueError if kl is not
        finite.
        """
        if not math.isfinite(kl):
            raise ValueError(
                f"the measured KL is {kl}: the policy or the reference gave log-probs that are not finite."
            )
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return replace(self, coef=self.coef * (1.0 + error * min(num_samples / self.horizon, 1.0)))


KLController = FixedKL | AdaptiveKL
