"""Guards: bounds on what an iteration may look like, judged after every update and before its weights are kept."""

import logging
import math
from collections.abc import Mapping, Sequence

from engine.config import GuardConfig
from engine.errors import DivergedError
from engine.metrics import Metrics

log = logging.getLogger(__name__)

WATCHED = {
    "kl": "policy/ref_kl",
    "step_kl": "policy/approx_kl",
    "entropy": "policy/sample_entropy",
    "length": "rollout/response_tokens_mean",
    "clip_share": "policy/clip_frac",
    "dead_groups": "reward/zero_spread_share",
    "reward_spread": "reward/score_std",
    "mismatch": "rollout/logprob_gap_mean",
    "mismatch_weight": "rollout/ess_share",
}
RATE = "rate_scale"  # controller: what the learning rate is multiplied with
LOWERED = 0.5  # by one action
_ROUNDING = 1e-6  # relative; scores this near to each other are one number


def judge(guards: Sequence[GuardConfig], metrics: Metrics, controllers: Mapping[str, float]) -> dict[str, float]:
    """The controllers after this iteration: how often in a row each guard was left, and the scale of the rate.

    A quantity that could not be measured (NaN) is outside every bound. One that this iteration has not (a warm-up of the
    critics updates no policy) is not judged. Raises DivergedError where a guard that stops has run out of patience.
    """
    after, stops = dict(controllers), []
    for position, guard in enumerate(guards):
        name, key = f"guard_{position}", WATCHED[guard.watch]
        if key not in metrics:
            continue
        value = metrics[key]
        after[name] = 0.0 if _inside(value, guard) else controllers.get(name, 0.0) + 1
        if after[name] < guard.patience:
            continue
        finding = _finding(position, guard, value, int(after[name]))
        if guard.action == "stop":
            stops.append(finding)
            continue
        log.warning("%s", finding)
        if guard.action == "lower_rate":
            after[RATE] = after.get(RATE, 1.0) * LOWERED
            after[name] = 0.0
    if stops:
        raise DivergedError(
            " ".join(stops),
            remedy="The last committed iteration is kept. Look at what the policy answers, then lower train.lr, raise the "
            "KL coefficient, or set other bounds. Other options make another run: one that begins where this one stopped has "
            "model.source=runs:RUN_KEY, model.init=pretrained and sft=null.",
        )
    return after


def equal_scores(metrics: Mapping[str, float | None]) -> float | None:
    """The number that all scores of an iteration were, so that they taught nothing; None = they differed, or were not there."""
    spread, mean = metrics.get("reward/score_std"), metrics.get("reward/score_mean")
    if spread is None or mean is None or not spread <= _ROUNDING * max(1.0, abs(mean)):
        return None
    return mean


def lowers_rate(guards: Sequence[GuardConfig]) -> bool:
    """Whether any guard may change the learning rate."""
    return any(guard.action == "lower_rate" for guard in guards)


def _inside(value: float, guard: GuardConfig) -> bool:
    above = -math.inf if guard.below is None else guard.below
    below = math.inf if guard.above is None else guard.above
    return above <= value <= below


def _finding(position: int, guard: GuardConfig, value: float, times: int) -> str:
    bounds = [
        f"{side} {limit:g}" for side, limit in (("above", guard.above), ("below", guard.below)) if limit is not None
    ]
    action = {"warn": "", "lower_rate": " The learning rate is halved.", "stop": ""}[guard.action]
    return (
        f"guards[{position}]: {guard.watch} ({WATCHED[guard.watch]}) is {value:g}, {times} time(s) in a row; "
        f"it must not be {' or '.join(bounds)}.{action}"
    )
