"""How much better than expected each response token was: every estimator, [B, R], zero outside the mask, detached.

A score that is NaN or infinite is unscored: the sample leaves the baseline of its group and gets advantage 0. Groups
come from group_ids in any order. Groups without spread, and groups with fewer than two scored samples, get exact zeros.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.algorithms.masked import Metric, as_float, check_mask, keep, masked_whiten, safe_divide, scored_mask
from engine.errors import ShapeError


def gae(
    token_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, R] by generalised advantage estimation (Schulman et al. 2016, eq. 16). Not whitened.

    token_rewards, values: [B, R], reward units; response_mask: [B, R] bool. A token outside the mask (tool text) is
    stepped
    over: the next value is that of the next True token, and no discount is paid for the gap.
    bootstrap_values: [B], value after the last token of a response cut by length; NaN = the response ended by itself.
    None = all ended.
    Rows with a reward that is not finite are unscored: advantage 0, returns = values. Keep them out of whitening and of
    the value loss with scored_mask.
    """
    check_mask(response_mask, {"token_rewards": token_rewards, "values": values})
    scored = _scored_rows(token_rewards, response_mask)
    rewards = keep(token_rewards.detach(), scored)
    values = keep(values.detach(), response_mask)
    next_value = values.new_zeros(len(values))
    if bootstrap_values is not None:
        _check_rows(bootstrap_values, response_mask, "bootstrap_values")
        after = bootstrap_values.detach().to(values.dtype)
        next_value = torch.where(torch.isnan(after), next_value, after)
    advantages = torch.zeros_like(values)
    running = torch.zeros_like(next_value)
    for t in reversed(range(values.shape[1])):
        chosen, value = response_mask[:, t], values[:, t]
        delta = rewards[:, t] + gamma * next_value - value
        running = torch.where(chosen, delta + gamma * lam * running, running)
        next_value = torch.where(chosen, value, next_value)
        advantages[:, t] = running
    advantages = keep(advantages, scored)
    return advantages, advantages + values


def grpo(scores: Tensor, group_ids: Tensor, response_mask: Tensor, *, scale: str = "std") -> Tensor:
    """Score minus group mean, over (sample std + 1e-6) of the group (DeepSeekMath, Shao et al. 2024).

    scores, group_ids: [B]; scale: "std" (n-1) or "none", which is Dr. GRPO (Liu et al. 2025).
    """
    if scale not in ("std", "none"):
        raise ValueError(f"scale must be 'std' or 'none', found {scale!r}.")
    groups = _groups(scores, group_ids)
    centred = groups.minus(groups.mean)
    if scale == "std":
        variance = safe_divide(groups.total(centred * centred), (groups.count - 1).clamp(min=0))
        centred = centred / (variance.sqrt() + 1e-6)[groups.index]
    return _spread_over_tokens(centred, response_mask)


def rloo(scores: Tensor, group_ids: Tensor, response_mask: Tensor) -> Tensor:
    """Score minus the mean of the other scored samples of the group (Ahmadian et al. 2024). scores, group_ids: [B]."""
    groups = _groups(scores, group_ids)
    leave_one_out = safe_divide(groups.count, (groups.count - 1).clamp(min=0))
    return _spread_over_tokens(groups.minus(groups.mean) * leave_one_out[groups.index], response_mask)


def remax(scores: Tensor, greedy_scores: Tensor, response_mask: Tensor) -> Tensor:
    """Score minus the score of the greedy response to the same prompt (Li et al. 2024). Both [B], row by row.

    The reward to go of a score given at the end is the score at every token. Rows missing either score get 0.
    """
    _check_rows(scores, response_mask, "scores")
    _check_rows(greedy_scores, response_mask, "greedy_scores")
    difference = as_float(scores.detach()) - as_float(greedy_scores.detach())
    return _spread_over_tokens(keep(difference, torch.isfinite(difference)), response_mask)


def reinforce_plus_plus(token_rewards: Tensor, response_mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Whitened reward to go (Hu 2025). token_rewards: [B, R] with the KL penalty inside (see kl.shape_rewards).

    Rows with a reward that is not finite are unscored: they stay out of the whitening and get 0.
    """
    check_mask(response_mask, {"token_rewards": token_rewards})
    scored = _scored_rows(token_rewards, response_mask)
    rewards = keep(token_rewards.detach(), scored)
    to_go = torch.zeros_like(rewards)
    running = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        running = torch.where(response_mask[:, t], rewards[:, t] + gamma * running, running)
        to_go[:, t] = running
    return masked_whiten(to_go, scored)


def reinforce_plus_plus_baseline(scores: Tensor, group_ids: Tensor, response_mask: Tensor) -> Tensor:
    """Score minus group mean, whitened over all tokens of the scored rows (Hu 2025). scores, group_ids: [B].

    The whitening is the last step of the definition, so a group without spread ends at minus the batch mean, not at 0.
    """
    groups = _groups(scores, group_ids)
    centred = _spread_over_tokens(groups.minus(groups.mean), response_mask)
    return masked_whiten(centred, scored_mask(scores, response_mask))


def opo(scores: Tensor, group_ids: Tensor, response_mask: Tensor) -> Tensor:
    """Score minus the length-weighted mean score of the group (Hao et al. 2025). scores, group_ids: [B]."""
    groups = _groups(scores, group_ids)
    lengths = keep(response_mask.sum(-1).to(groups.scores.dtype), groups.scored)
    baseline = safe_divide(groups.total(lengths * groups.scores), groups.total(lengths))
    return _spread_over_tokens(groups.minus(baseline), response_mask)


def gpg(scores: Tensor, group_ids: Tensor, response_mask: Tensor) -> Tensor:
    """alpha (score - group mean), alpha = samples / scored samples in groups with spread (Chu et al. 2025).

    alpha gives back the gradient that the samples without any would have carried; those are counted in `samples` too.
    """
    groups = _groups(scores, group_ids)
    learning = (groups.scored & groups.has_spread[groups.index]).sum()
    alpha = safe_divide(torch.full_like(groups.scores, len(scores)), learning)
    return _spread_over_tokens(alpha * groups.minus(groups.mean), response_mask)


def overlong_penalty(response_lengths: Tensor, *, max_tokens: int, buffer: int) -> Tensor:
    """Addition to the score [B]: 0 up to max_tokens - buffer, then linear to -1 at max_tokens (DAPO, Yu et al. 2025).

    response_lengths: [B] int64, tokens. 0 < buffer <= max_tokens, else ValueError.
    """
    if not 0 < buffer <= max_tokens:
        raise ValueError(f"the overlong buffer must lie in 1..{max_tokens} (the largest response), found {buffer}.")
    return ((max_tokens - buffer - response_lengths).float() / buffer).clamp(-1.0, 0.0)


def has_spread(scores: Tensor, group_ids: Tensor) -> Tensor:
    """Samples [B] bool whose group has two different scores: only they teach a group algorithm anything."""
    groups = _groups(scores, group_ids)
    return groups.has_spread[groups.index]


def group_metrics(scores: Tensor, group_ids: Tensor) -> dict[str, Metric]:
    """What the groups can teach; scores, group_ids: [B]. See masked.Metric for how the numbers combine.

    reward/zero_spread_share: among groups with at least one scored sample, those whose scores are all equal (their
    samples get advantage 0). reward/unscored_count: samples; reward/unscored_group_count: groups without a single
    score.
    """
    groups = _groups(scores, group_ids)
    alive = groups.count > 0
    num_alive = alive.sum().to(groups.scores.dtype)
    without_spread = (alive & ~groups.has_spread).sum().to(groups.scores.dtype)
    one = torch.ones_like(num_alive)
    return {
        "reward/zero_spread_share": (safe_divide(without_spread, num_alive), num_alive),
        "reward/unscored_count": ((~groups.scored).sum().to(groups.scores.dtype), one),
        "reward/unscored_group_count": ((~alive).sum().to(groups.scores.dtype), one),
    }


@dataclass(frozen=True)
class _Groups:
    """Scored samples of G groups: scores (0 where unscored), scored, index [B]; count, mean, has_spread [G]."""

    scores: Tensor
    scored: Tensor
    index: Tensor
    count: Tensor
    mean: Tensor
    has_spread: Tensor

    def total(self, per_sample: Tensor) -> Tensor:
        """Sum per group, [G]; the caller has put 0 where a sample is unscored."""
        return torch.zeros_like(self.mean).index_add(0, self.index, per_sample)

    def minus(self, baseline: Tensor) -> Tensor:
        """Score minus the baseline [G] of its group; 0 for unscored samples and groups without spread."""
        return keep(self.scores - baseline[self.index], self.scored & self.has_spread[self.index])


def _groups(scores: Tensor, group_ids: Tensor) -> _Groups:
    if scores.dim() != 1 or scores.shape != group_ids.shape:
        raise ShapeError(
            f"scores and group_ids must both be [B], found {tuple(scores.shape)} and {tuple(group_ids.shape)}.",
            remedy="Give one score and one group id per sample.",
        )
    ids, index = torch.unique(group_ids, return_inverse=True)
    scored = torch.isfinite(scores)
    kept = keep(scores.detach(), scored)
    zeros = kept.new_zeros(len(ids))
    count = zeros.index_add(0, index, scored.to(kept.dtype))
    mean = safe_divide(zeros.index_add(0, index, kept), count)
    # Equal scores are found by comparing, not by a small std: the mean of equal floats need not be that float.
    lowest = torch.full_like(zeros, torch.inf).scatter_reduce(0, index[scored], kept[scored], "amin")
    highest = torch.full_like(zeros, -torch.inf).scatter_reduce(0, index[scored], kept[scored], "amax")
    return _Groups(kept, scored, index, count, mean, highest > lowest)


def _scored_rows(token_rewards: Tensor, response_mask: Tensor) -> Tensor:
    missing = response_mask & ~torch.isfinite(token_rewards)
    return response_mask & ~missing.any(-1, keepdim=True)


def _check_rows(per_row: Tensor, response_mask: Tensor, name: str) -> None:
    if per_row.shape != response_mask.shape[:1]:
        raise ShapeError(
            f"{name} must be [B] = [{len(response_mask)}] like the rows of the mask, found {tuple(per_row.shape)}.",
            remedy="Give one number per sample.",
        )


def _spread_over_tokens(per_row: Tensor, response_mask: Tensor) -> Tensor:
    check_mask(response_mask, {})
    _check_rows(per_row, response_mask, "the score of a sample")
    return keep(per_row[:, None].expand(response_mask.shape), response_mask)
