"""How much of what the devices can do an iteration used: memory at its peak, and model FLOPs against the device's own."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.architecture import read_architecture
from engine.metrics import Metrics

_GIB = 2**30
_FORWARD, _TRAINING = (
    2,
    6,
)  # FLOPs per parameter and token: one multiplication and addition; the backward pass is two more


@dataclass(frozen=True)
class Resources:
    """One rank as its worker reports it: `host:pid`, most bytes held since the process began, FLOP/s of its device."""

    process: str
    peak_bytes: int
    rate: float  # NaN = not known


Reports = Mapping[str, Sequence[Resources]]  # role -> one report per rank


def model_sizes(source: Path) -> dict[str, float]:
    """Parameters of the roles that learn; NaN for a model whose shapes are not known."""
    shapes = read_architecture(source)
    if shapes is None:
        return {"policy": math.nan, "critic": math.nan, "cost_critic": math.nan}
    return {
        "policy": shapes.parameters,
        "critic": shapes.value_parameters,
        "cost_critic": shapes.value_parameters,
    }


def memory_metrics(reports: Reports) -> Metrics:
    """memory/ROLE_peak_gib: the most that a process of the role has held, together with the roles that share it."""
    metrics = Metrics()
    for role, ranks in reports.items():
        for one in ranks:
            metrics = metrics.with_value(f"memory/{role}_peak_gib", one.peak_bytes / _GIB, "max")
    return metrics


def rollout_metrics(
    reports: Reports, seconds: Metrics, tokens: int, sizes: Mapping[str, float], parallel: int
) -> Metrics:
    """perf/mfu_rollout: 2 N FLOPs for every token that was computed (a prompt once for all of its samples) over what the
    engines' devices could do in the time of generation; parallel: devices per engine. NaN where device or model is unknown."""
    flop = _FORWARD * sizes["policy"] * tokens
    share = _share(flop, seconds["time/rollout_generate_s"], _rate(reports, ["rollout"]) * parallel)
    return memory_metrics(reports).with_value("perf/mfu_rollout", share)


def train_metrics(reports: Reports, seconds: Metrics, tokens: int, sizes: Mapping[str, float]) -> Metrics:
    """perf/mfu_train: 6 N FLOPs for every token that a role learned from (epochs counted), of all roles that learned,
    over what their devices could do in the time of the longest update; perf/train_tokens_per_s."""
    learned = [role for role in sizes if f"time/{role}_update_s" in seconds]
    longest = max((seconds[f"time/{role}_update_s"] for role in learned), default=math.nan)
    flop = sum(_TRAINING * sizes[role] * tokens for role in learned)
    metrics = memory_metrics(reports).with_value("perf/mfu_train", _share(flop, longest, _rate(reports, learned)))
    return metrics.with_value("perf/train_tokens_per_s", _share(tokens, longest, 1.0))


def _rate(reports: Reports, roles: Sequence[str]) -> float:
    """FLOP/s of all devices of these roles; one that several roles of a process share counts once."""
    rates = {one.process: one.rate for role in roles for one in reports[role]}
    return sum(rates.values()) if rates else math.nan


def _share(work: float, seconds: float, rate: float) -> float:
    able = seconds * rate
    return work / able if able > 0 else math.nan
