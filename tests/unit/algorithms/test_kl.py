"""KL: known numbers, no overflow, garbage outside the mask, where the score goes, and the two controllers."""

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.algorithms.kl import AdaptiveKL, FixedKL, kl_estimate, shape_rewards
from engine.errors import ShapeError

NAN = math.nan
KINDS = ("k1", "k2", "k3", "abs")


def estimate(d: float, kind: str, dtype: torch.dtype = torch.float32) -> tuple[float, float]:
    """Value and gradient at logprob - ref_logprob = d, with the policy's log-prob at -1."""
    logprobs = torch.tensor([-1.0], dtype=dtype, requires_grad=True)
    value = kl_estimate(logprobs, torch.tensor([-1.0 - d], dtype=dtype), kind)
    value.sum().backward()
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    return value.item(), logprobs.grad.item()


@pytest.mark.parametrize(("d", "expected"), [(-0.5, 0.148721), (0.5, 0.106531)])
def test_k3_has_its_known_values(d, expected):
    assert estimate(d, "k3")[0] == pytest.approx(expected, abs=1e-6)
    assert estimate(d, "k3", torch.bfloat16)[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", [100.0, -100.0])
def test_value_and_gradient_stay_finite_and_pull_towards_the_reference(kind, d, dtype):
    value, gradient = estimate(d, kind, dtype)
    assert math.isfinite(value) and math.isfinite(gradient)
    assert kind == "k1" or value > 0
    # Descent must lower a log-prob above the reference and raise one below; k1 lowers always, by definition.
    assert gradient > 0 if kind == "k1" or d > 0 else gradient < 0


@given(st.floats(-50, 50, width=32))
def test_k3_is_never_negative_and_k1_may_be(d):
    assert estimate(d, "k3")[0] >= 0
    assert estimate(d, "k1")[0] == pytest.approx(-1.0 - float(torch.tensor(-1.0 - d)))


def test_k3_grows_with_the_distance():
    d = torch.linspace(-60, 60, 241)
    k3 = kl_estimate(d, torch.zeros_like(d), "k3")
    assert (k3[:120].diff() < 0).all() and (k3[121:].diff() > 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_equal_models_have_distance_zero(kind):
    assert estimate(0.0, kind)[0] == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf, -1e30])
def test_garbage_outside_the_mask_reaches_neither_value_nor_gradient(kind, bad):
    logprobs = torch.tensor([[-1.0, bad]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    value = kl_estimate(logprobs, torch.tensor([[-1.5, 0.0]]), kind, response_mask=mask)
    value.sum().backward()
    assert value[0, 1].item() == 0 and logprobs.grad[0, 1].item() == 0
    assert value[0, 0].item() == pytest.approx(estimate(0.5, kind)[0])


def test_the_reference_gets_no_gradient():
    ref = torch.zeros(2, requires_grad=True)
    assert not kl_estimate(torch.ones(2), ref, "k3").requires_grad


def test_refusals():
    with pytest.raises(ShapeError, match=r"\(2,\).*\(3,\)"):
        kl_estimate(torch.zeros(2), torch.zeros(3), "k1")
    with pytest.raises(ValueError, match="'k1', 'k2', 'k3', 'abs', found 'k4'"):
        kl_estimate(torch.zeros(2), torch.zeros(2), "k4")
    with pytest.raises(ShapeError, match=r"\[2\].*\(3,\)"):
        shape_rewards(torch.zeros(3), torch.zeros(2, 4), torch.zeros(2, 4), torch.ones(2, 4, dtype=torch.bool), 0.1)


def test_the_score_lands_on_the_last_response_token():
    """Of a full row, a short one, one that ends in tool text, an empty one and an unscored one."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0], [1, 1, 0]]).bool()
    mask[2] = torch.tensor([True, False, True])
    old, ref = torch.full((5, 3), -1.0), torch.full((5, 3), -3.0)
    old[~mask] = NAN
    found = shape_rewards(torch.tensor([1.0, 2.0, 3.0, 4.0, NAN]), old, ref, mask, 0.5)
    expected = [[-1, -1, 0], [1, 0, 0], [-1, 0, 2], [0, 0, 0], [-1, NAN, 0]]
    torch.testing.assert_close(found, torch.tensor(expected).float(), equal_nan=True)


@pytest.mark.parametrize("missing", [NAN, math.inf, -math.inf])
def test_an_unscored_sample_is_marked_and_never_zero(missing):
    mask = torch.ones(1, 2, dtype=torch.bool)
    found = shape_rewards(torch.tensor([missing]), torch.zeros(1, 2), torch.zeros(1, 2), mask, 0.0)
    assert found[0, 0].item() == 0 and found[0, 1].isnan()


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)], ids=str)
def test_empty_batches(shape):
    mask = torch.ones(shape, dtype=torch.bool)
    assert shape_rewards(torch.zeros(shape[0]), torch.zeros(shape), torch.zeros(shape), mask, 0.1).shape == shape


def test_the_adaptive_coefficient_follows_its_target():
    state = AdaptiveKL(coef=0.2, target=6.0, horizon=10_000)
    assert state.updated(6.6, 256).coef == pytest.approx(0.2 * (1 + 0.1 * 256 / 10_000))
    assert state.updated(60.0, 256).coef == pytest.approx(0.2 * (1 + 0.2 * 256 / 10_000))
    assert state.updated(-1.0, 256).coef == pytest.approx(0.2 * (1 - 0.2 * 256 / 10_000))
    assert state.updated(6.0, 256) == state


def test_a_batch_larger_than_the_horizon_cannot_turn_the_sign():
    assert AdaptiveKL(coef=0.2, target=6.0, horizon=10).updated(0.0, 1000).coef == pytest.approx(0.16)


@pytest.mark.parametrize("state", [FixedKL(0.1), AdaptiveKL(0.1, 6.0, 1e4)], ids=["fixed", "adaptive"])
def test_a_controller_survives_json(state):
    later = state.updated(3.0, 64)
    assert type(state)(**json.loads(json.dumps(dataclasses.asdict(later)))) == later


def test_the_fixed_coefficient_stays():
    assert FixedKL(0.1).updated(100.0, 64).coef == 0.1


def test_a_kl_that_is_not_finite_stops_the_controller():
    with pytest.raises(ValueError, match="nan"):
        AdaptiveKL(0.1, 6.0, 1e4).updated(NAN, 64)
    with pytest.raises(ValueError, match="positive"):
        AdaptiveKL(0.1, 0.0, 1e4)
