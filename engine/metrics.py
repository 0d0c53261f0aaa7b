"""Typed metrics: every value carries how it combines, so that ranks and micro-batches can be split in any way."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Reduction = Literal["mean", "sum", "max", "min"]
OF_THE_MACHINE = ("time/", "perf/", "memory/")  # areas whose numbers differ between two runs of the same configuration
_BY_SUFFIX: dict[str, Reduction] = {"max": "max", "min": "min", "count": "sum"}


@dataclass(frozen=True)
class Metric:
    """One number and its rule: a mean carries the weight (tokens, samples) it was taken over."""

    value: float
    reduction: Reduction = "mean"
    weight: float = 1.0

    def combine(self, other: "Metric") -> "Metric":
        """Both together, as if measured in one go; different rules for one name are a fault of the code."""
        if self.reduction != other.reduction:
            raise ValueError(f"one metric was reported as {self.reduction} and as {other.reduction}")
        if self.reduction == "sum":
            return Metric(self.value + other.value, "sum")
        if self.reduction in ("max", "min"):
            known = [value for value in (self.value, other.value) if not math.isnan(value)]
            pick = max if self.reduction == "max" else min
            return Metric(pick(known) if known else math.nan, self.reduction)
        return _combined_mean(self, other)


def _combined_mean(left: Metric, right: Metric) -> Metric:
    weight = left.weight + right.weight
    if weight == 0:
        return Metric(math.nan, "mean", 0.0)
    total = sum(metric.value * metric.weight for metric in (left, right) if metric.weight > 0)
    return Metric(total / weight, "mean", weight)


class Metrics:
    """Named metrics of one step; `a | b` combines, `values()` gives plain numbers (NaN = nothing was measured)."""

    def __init__(self, items: Mapping[str, Metric] | None = None) -> None:
        self._items = dict(items or {})

    def __or__(self, other: "Metrics") -> "Metrics":
        merged = dict(self._items)
        for name, metric in other._items.items():
            merged[name] = merged[name].combine(metric) if name in merged else metric
        return Metrics(merged)

    def __getitem__(self, name: str) -> float:
        return self._items[name].value

    def __contains__(self, name: str) -> bool:
        return name in self._items

    def values(self) -> dict[str, float]:
        """Name -> number, sorted by name."""
        return {name: self._items[name].value for name in sorted(self._items)}

    def renamed(self, areas: Mapping[str, str]) -> "Metrics":
        """The same numbers, names that begin with a key of `areas` beginning with its value instead."""
        return Metrics({_renamed(name, areas): metric for name, metric in self._items.items()})

    def with_value(self, name: str, value: float, reduction: Reduction = "mean", weight: float = 1.0) -> "Metrics":
        """The metrics with one more number combined in."""
        return self | Metrics({name: Metric(float(value), reduction, weight)})


def _renamed(name: str, areas: Mapping[str, str]) -> str:
    for area, other in areas.items():
        if name.startswith(area):
            return other + name.removeprefix(area)
    return name


def from_pairs(pairs: Mapping[str, tuple[Any, Any]]) -> Metrics:
    """Metrics of a pure function: name -> (value, weight) as numbers or 0-dim tensors.

    Names ending in _max and _min combine so, _count by sum, all others as weighted means; weight 0 = nothing measured.
    """
    items = {}
    for name, (value, weight) in pairs.items():
        reduction = _BY_SUFFIX.get(name.rsplit("_", 1)[-1], "mean")
        missing = float(weight) == 0.0 and reduction != "sum"
        items[name] = Metric(
            math.nan if missing else float(value), reduction, float(weight) if reduction == "mean" else 1.0
        )
    return Metrics(items)


def merge(parts: Iterable[Metrics]) -> Metrics:
    """All parts combined."""
    result = Metrics()
    for part in parts:
        result = result | part
    return result
