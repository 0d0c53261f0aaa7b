"""The learning rate of every optimiser step."""

import pytest

from engine.backends.optimizer import lr_at
from engine.config import OptimizerConfig


def rates(total_steps: int, **options: object) -> list[float]:
    optimizer = OptimizerConfig(lr=1.0, **options)  # type: ignore[arg-type]
    return [lr_at(step, optimizer, total_steps) for step in range(total_steps)]


def test_constant_is_constant() -> None:
    assert rates(3) == [1.0, 1.0, 1.0]


def test_warm_up_rises_to_the_full_rate_and_never_wastes_a_step_at_zero() -> None:
    assert rates(5, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_falls_evenly_and_would_be_zero_one_step_after_the_last() -> None:
    assert rates(4, schedule="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert rates(6, schedule="linear", warmup_steps=2) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_cosine_is_half_way_down_in_the_middle() -> None:
    assert rates(4, schedule="cosine") == pytest.approx([1.0, 0.8535533905932737, 0.5, 0.14644660940672624])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_beyond_the_planned_end_the_rate_stays_zero(schedule: str) -> None:
    optimizer = OptimizerConfig(lr=1.0, schedule=schedule)  # type: ignore[arg-type]
    assert [lr_at(step, optimizer, 4) for step in (4, 5, 100)] == pytest.approx([0.0, 0.0, 0.0])


def test_a_run_shorter_than_its_warm_up_only_warms_up() -> None:
    assert rates(2, schedule="linear", warmup_steps=4) == [0.25, 0.5]
