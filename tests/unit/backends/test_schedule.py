"""The learning rate of every optimiser step, by plan or steered by the KL of the policy to itself."""

import pytest

from engine.backends.schedule import Schedule, lr_at
from engine.config import OptimizerConfig
from engine.errors import DivergedError, HybridFlowError


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


def steered(**options: object) -> Schedule:
    values = {"lr": 1e-3, "schedule": "adaptive_kl", "kl_target": 0.01, "lr_min": 1e-4, "lr_max": 2e-3} | options
    return Schedule(OptimizerConfig(**values), total_steps=10)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kl", "rate"),
    [(0.021, 1e-3 / 1.5), (0.02, 1e-3), (0.01, 1e-3), (0.005, 1e-3), (0.0049, 1.5e-3), (0.0, 1.5e-3)],
)
def test_the_rate_falls_above_twice_the_target_and_rises_below_half_of_it(kl: float, rate: float) -> None:
    schedule = steered()
    schedule.adapt(kl)
    assert schedule.rate() == pytest.approx(rate)


def test_the_rate_stays_within_its_bounds_and_warms_up_below_them() -> None:
    schedule = steered(warmup_steps=2)
    for _ in range(20):
        schedule.adapt(1.0)
    assert schedule.rate() == pytest.approx(0.5e-4)
    schedule.steps = 2
    assert schedule.rate() == pytest.approx(1e-4)
    for _ in range(20):
        schedule.adapt(0.0)
    assert schedule.rate() == pytest.approx(2e-3)


def test_a_steered_rate_is_continued_from_its_state() -> None:
    schedule = steered()
    schedule.adapt(1.0)
    schedule.steps = 3
    other = steered()
    other.load(schedule.state())
    assert (other.steps, other.rate()) == (3, schedule.rate())
    assert set(Schedule(OptimizerConfig(), 3).state()) == {"step"}


def test_a_kl_that_is_not_finite_or_not_asked_for_is_refused() -> None:
    with pytest.raises(DivergedError, match="nan"):
        steered().adapt(float("nan"))
    with pytest.raises(HybridFlowError, match="adaptive_kl"):
        Schedule(OptimizerConfig(), 3).adapt(0.1)
