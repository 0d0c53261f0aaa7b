"""Shares of what devices can do: exact on round numbers, NaN where anything is not known, no device counted twice."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.metrics import Metrics
from engine.utilisation import Resources, memory_metrics, model_sizes, rollout_metrics, train_metrics
from tests.contracts.sources import ROOT

SIZES = {"policy": 1000.0, "critic": 500.0}
GIB = 2**30


def ranks(count: int, process: str = "host:{}", rate: float = 1e6) -> list[Resources]:
    return [Resources(process.format(rank), GIB * (rank + 1), rate) for rank in range(count)]


def seconds(**spent: float) -> Metrics:
    metrics = Metrics()
    for name, value in spent.items():
        metrics = metrics.with_value(f"time/{name}_s", value, "sum")
    return metrics


def test_generation_is_two_operations_per_parameter_and_token():
    found = rollout_metrics({"rollout": ranks(2)}, seconds(rollout_generate=10.0), 5000, SIZES, 1)
    assert found["perf/mfu_rollout"] == pytest.approx(2 * 1000 * 5000 / (10.0 * 2e6))
    halved = rollout_metrics({"rollout": ranks(2)}, seconds(rollout_generate=10.0), 5000, SIZES, 2)
    assert halved["perf/mfu_rollout"] == pytest.approx(found["perf/mfu_rollout"] / 2)


def test_training_is_six_operations_of_every_role_that_learned():
    reports = {"policy": ranks(2), "critic": ranks(2), "reward": ranks(2)}
    both = train_metrics(reports, seconds(policy_update=20.0, critic_update=8.0), 4000, SIZES)
    assert both["perf/mfu_train"] == pytest.approx(6 * 1500 * 4000 / (20.0 * 2e6))
    assert both["perf/train_tokens_per_s"] == 200.0
    warm_up = train_metrics(reports, seconds(critic_update=8.0), 4000, SIZES)
    assert warm_up["perf/mfu_train"] == pytest.approx(6 * 500 * 4000 / (8.0 * 2e6))


def test_a_process_that_two_roles_share_counts_once_and_separate_ones_twice():
    spent = seconds(policy_update=10.0, critic_update=10.0)
    shared = train_metrics({"policy": ranks(2), "critic": ranks(2)}, spent, 100, SIZES)
    separate = train_metrics({"policy": ranks(2), "critic": ranks(2, "other:{}")}, spent, 100, SIZES)
    assert shared["perf/mfu_train"] == pytest.approx(2 * separate["perf/mfu_train"])


@pytest.mark.parametrize(
    ("rate", "sizes", "spent"),
    [(math.nan, SIZES, 10.0), (1e6, {"policy": math.nan, "critic": math.nan}, 10.0), (1e6, SIZES, 0.0)],
    ids=["device", "model", "time"],
)
def test_what_is_not_known_is_nan_and_never_zero(rate: float, sizes: dict[str, float], spent: float):
    reports = {"rollout": ranks(1, rate=rate), "policy": ranks(1, rate=rate)}
    assert math.isnan(rollout_metrics(reports, seconds(rollout_generate=spent), 10, sizes, 1)["perf/mfu_rollout"])
    assert math.isnan(train_metrics(reports, seconds(policy_update=spent), 10, sizes)["perf/mfu_train"])
    assert math.isnan(train_metrics(reports, seconds(), 10, sizes)["perf/mfu_train"])


@given(st.lists(st.integers(1, 2**40), min_size=1, max_size=8))
def test_memory_of_a_role_is_that_of_its_fullest_rank(peaks: list[int]):
    found = memory_metrics({"policy": [Resources(f"host:{i}", peak, 1.0) for i, peak in enumerate(peaks)]})
    assert found["memory/policy_peak_gib"] == max(peaks) / GIB


def test_sizes_come_from_the_model_folder_and_unknown_ones_are_nan(tmp_path: Path):
    assert model_sizes(ROOT / "deployments" / "presets" / "models" / "smoke")["policy"] == 43_200
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert all(math.isnan(value) for value in model_sizes(tmp_path).values())
