"""Rates: warm-up, decay, and the rate that follows the policy's KL and survives a restart."""

import pytest
import torch

from engine.backends.schedule import Schedule
from engine.config import OptimizerConfig
from engine.errors import DivergedError, HybridFlowError

ADAPTIVE = OptimizerConfig(schedule="adaptive_kl", kl_target=0.01, lr=1e-4, lr_min=5e-5, lr_max=3e-4)


def test_far_slows_down_near_speeds_up_between_stays():
    schedule = Schedule(ADAPTIVE, 10)
    rates = []
    for kl in (0.021, 0.02, 0.005, 0.004, 0.0):
        schedule.adapt(kl)
        rates.append(schedule.rate())
    assert rates == pytest.approx([1e-4 / 1.5, 1e-4 / 1.5, 1e-4 / 1.5, 1e-4, 1.5e-4])


def test_bounds_hold():
    schedule = Schedule(ADAPTIVE, 10)
    for _ in range(5):
        schedule.adapt(1.0)
    assert schedule.rate() == 5e-5
    for _ in range(9):
        schedule.adapt(0.0)
    assert schedule.rate() == 3e-4


def test_warm_up_leads_to_the_adapted_rate():
    schedule = Schedule(ADAPTIVE.model_copy(update={"warmup_steps": 4}), 10)
    schedule.adapt(0.0)
    rates = []
    for _ in range(5):
        rates.append(schedule.rate())
        schedule.steps += 1
    assert rates == pytest.approx([1.5e-4 * share for share in (0.25, 0.5, 0.75, 1.0, 1.0)])


def test_the_rate_survives_a_restart_exactly():
    before, after = Schedule(ADAPTIVE, 10), Schedule(ADAPTIVE, 10)
    before.adapt(0.0)
    before.steps = 7
    after.load(before.state())
    assert (after.rate(), after.steps) == (before.rate(), 7)


def test_other_schedules_keep_only_the_step():
    """Files of earlier runs stay readable."""
    state = Schedule(OptimizerConfig(), 10).state()
    assert list(state) == ["step"]
    assert state["step"].dtype == torch.int64


def test_a_kl_that_is_no_number_stops_the_run():
    with pytest.raises(DivergedError, match="nan"):
        Schedule(ADAPTIVE, 10).adapt(float("nan"))


def test_a_fixed_schedule_does_not_listen():
    with pytest.raises(HybridFlowError, match="constant"):
        Schedule(OptimizerConfig(), 10).adapt(0.1)
