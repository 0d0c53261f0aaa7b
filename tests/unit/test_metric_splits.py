"""Metrics are those of the whole batch however its rows are dealt to ranks and cut into micro-batches."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.algorithms import losses
from engine.algorithms.advantages import group_metrics
from engine.algorithms.correction import rollout_weights
from engine.metrics import Metric, Metrics, from_pairs, merge

WIDTH = 5
RANKS, PARTS = 3, 3
Rows = dict[str, Tensor]

# A name and its values: numbers that were measured, NaN that was measured, nothing that was measured (weight 0).
measured = st.tuples(st.floats(-1e3, 1e3), st.integers(1, 9))
nothing = st.tuples(st.just(math.nan), st.just(0))
samples = st.lists(st.one_of(measured, nothing), min_size=1, max_size=15)
places = st.lists(st.tuples(st.integers(0, RANKS - 1), st.integers(0, PARTS - 1)), min_size=15, max_size=15)


def dealt(items: list[Any], places: list[tuple[int, int]]) -> list[list[list[Any]]]:
    """Items of every micro-batch of every rank; some are empty."""
    cells: list[list[list[Any]]] = [[[] for _ in range(PARTS)] for _ in range(RANKS)]
    for item, (rank, part) in zip(items, places, strict=False):
        cells[rank][part].append(item)
    return cells


def same(left: Metrics, right: Metrics, tolerance: float) -> None:
    assert left.values().keys() == right.values().keys()
    for name, value in left.values().items():
        assert value == pytest.approx(right[name], rel=tolerance, abs=tolerance, nan_ok=True), name


def four_rules(value: float, weight: float) -> Metrics:
    extreme = {
        f"m/{rule}": Metric(value if weight else math.nan, rule)
        for rule in ("max", "min")  # type: ignore[arg-type]
    }
    return from_pairs({"m/mean": (value, weight)}) | Metrics(
        {**extreme, "m/sum": Metric(value if weight else 0.0, "sum")}
    )


@given(samples, places, st.permutations(range(RANKS)))
def test_any_deal_over_ranks_and_micro_batches_is_the_whole(
    values: list[tuple[float, int]], where: list[tuple[int, int]], order: list[int]
):
    whole = merge(four_rules(*value) for value in values)
    cells = dealt(values, where)
    ranks = [merge(merge(four_rules(*value) for value in part) for part in rank) for rank in cells]
    same(merge(ranks[rank] for rank in order), whole, 1e-9)


@given(samples)
def test_the_whole_is_what_its_definition_says(values: list[tuple[float, int]]):
    found = merge(four_rules(*value) for value in values)
    known = [(value, weight) for value, weight in values if weight]
    if not known:
        assert all(math.isnan(found[f"m/{rule}"]) for rule in ("mean", "max", "min")) and found["m/sum"] == 0
        return
    weights = sum(weight for _, weight in known)
    mean = sum(value * weight for value, weight in known) / weights
    assert found["m/mean"] == pytest.approx(mean, rel=1e-9, abs=1e-9)
    assert found["m/max"] == max(value for value, _ in known) and found["m/min"] == min(value for value, _ in known)
    assert found["m/sum"] == pytest.approx(sum(value for value, _ in known), rel=1e-9, abs=1e-9)


def ppo(rows: Rows) -> Any:
    options = {"kind": "ppo", "dual_clip": 2.0, "normalizer": 10.0, "weights": rows["weights"]}
    return losses.policy_loss(rows["now"], rows["old"], rows["advantages"], rows["mask"], **options).metrics


MEASURED: dict[str, Callable[[Rows], Any]] = {
    "policy": ppo,
    **{
        f"policy {kind}": lambda rows, kind=kind: (
            losses.policy_loss(
                rows["now"], rows["old"], rows["advantages"], rows["mask"], kind=kind, normalizer=10.0
            ).metrics
        )
        for kind in losses.POLICY_LOSSES
    },
    "value": lambda rows: (
        losses.value_loss(rows["now"], rows["old"], rows["advantages"], rows["mask"], clip=0.2, normalizer=10.0).metrics
    ),
    "entropy": lambda rows: losses.entropy_loss(rows["weights"], rows["mask"], normalizer=10.0).metrics,
    "sft": lambda rows: losses.sft_loss(rows["now"], rows["mask"], normalizer=10.0).metrics,
    **{
        f"correction {mode}": lambda rows, mode=mode: rollout_weights(
            rows["now"], rows["old"], rows["mask"], mode=mode, cap=2.0
        )[1]
        for mode in ("none", "token", "icepop", "sequence", "geometric")
    },
    "groups": lambda rows: group_metrics(rows["scores"], rows["groups"]),
}


@st.composite
def batches(draw: st.DrawFn) -> list[Rows]:
    """Groups of one to three rows with ragged responses, some of them empty or unscored, as [B, WIDTH] float64."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    groups = []
    for group, size in enumerate(draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))):
        lengths = torch.randint(0, WIDTH + 1, (size, 1), generator=generator)
        fields = {
            name: torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
            for name in ("now", "old", "advantages")
        }
        scores = torch.randint(0, 3, (size,), generator=generator).double()
        groups.append(
            {
                **fields,
                "weights": torch.rand(size, WIDTH, generator=generator, dtype=torch.float64),
                "mask": torch.arange(WIDTH) < lengths,
                "scores": torch.where(scores == 2, torch.nan, scores),
                "groups": torch.full((size,), group),
            }
        )
    return groups


def joined(groups: list[Rows]) -> Rows:
    return {name: torch.cat([group[name] for group in groups]) for name in groups[0]}


def exact(pairs: Any) -> Metrics:
    """Metrics without the share of effective samples: a ratio of two means, which are there and from which it follows."""
    found = from_pairs(pairs)
    if "rollout/ess_share" in found and not math.isnan(found["rollout/ess_share"]):
        mean, square = found["rollout/weight_mean"], found["rollout/weight_square_mean"]
        assert found["rollout/ess_share"] == pytest.approx(mean**2 / square, rel=1e-6)
    return from_pairs({name: pair for name, pair in pairs.items() if name != "rollout/ess_share"})


@pytest.mark.parametrize("name", MEASURED)
@settings(max_examples=25)
@given(batch=batches(), where=places)
def test_what_losses_report_does_not_depend_on_the_split(name: str, batch: list[Rows], where: list[tuple[int, int]]):
    """Groups stay together: what they can teach is a property of the group."""
    measure = MEASURED[name]
    whole = exact(measure(joined(batch)))
    cells = dealt(batch, where)
    ranks = [merge(exact(measure(joined(part))) for part in rank if part) for rank in cells]
    same(merge(ranks), whole, 1e-6)  # shares of tokens are float32 even here
