"""The Lagrange multiplier: direction, ceiling, JSON, what it refuses; and the mix of reward and cost advantages."""

import dataclasses
import json
import math

import pytest
import torch

from engine.algorithms.lagrange import LagrangeController, safe_advantages
from engine.errors import ShapeError

START = LagrangeController(log_multiplier=0.0, cost_limit=0.5, lr=0.1, max_multiplier=5.0)


def test_the_multiplier_follows_the_cost():
    assert START.multiplier == 1.0
    assert START.updated(2.5).multiplier == pytest.approx(math.exp(0.1 * 2.0))
    assert START.updated(-1.5).multiplier == pytest.approx(math.exp(-0.1 * 2.0))
    assert START.updated(0.5) == START


def test_the_multiplier_stops_at_its_ceiling_and_comes_back_at_once():
    state = START
    for _ in range(50):
        state = state.updated(10.0)
    assert state.multiplier == pytest.approx(5.0)
    assert state.updated(-0.5).multiplier == pytest.approx(5.0 * math.exp(-0.1))
    assert dataclasses.replace(START, log_multiplier=1e6).multiplier == pytest.approx(5.0)


def test_the_state_survives_json():
    later = START.updated(0.7)
    assert LagrangeController(**json.loads(json.dumps(dataclasses.asdict(later)))) == later


def test_a_step_without_a_cost_is_refused():
    with pytest.raises(ValueError, match="nan"):
        START.updated(math.nan)
    with pytest.raises(ValueError, match="max_multiplier"):
        dataclasses.replace(START, max_multiplier=0.0)
    with pytest.raises(ValueError, match="lr"):
        dataclasses.replace(START, lr=-0.1)


def test_reward_and_cost_are_mixed_by_the_multiplier():
    reward, cost = torch.tensor([[1.0, -2.0]]), torch.tensor([[0.5, 4.0]])
    assert safe_advantages(reward, cost, 0.0).tolist() == reward.tolist()
    torch.testing.assert_close(safe_advantages(reward, cost, 3.0), torch.tensor([[(1 - 1.5) / 4, (-2 - 12) / 4]]))
    torch.testing.assert_close(safe_advantages(reward, cost, 1e9), -cost)


def test_mix_refusals():
    with pytest.raises(ShapeError, match=r"\(1, 2\).*\(2,\)"):
        safe_advantages(torch.zeros(1, 2), torch.zeros(2), 1.0)
    for bad in (-0.1, math.nan):
        with pytest.raises(ValueError, match=">= 0"):
            safe_advantages(torch.zeros(2), torch.zeros(2), bad)
