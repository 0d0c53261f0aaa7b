"""Losses: known numbers, denominators, on-policy start, dropped rows, empty batches, refused options."""

import math

import pytest
import torch

from engine.algorithms import losses
from engine.errors import ShapeError

NAN = math.nan
LOSSES = torch.tensor([[2.0, 2, NAN, NAN], [8, NAN, NAN, NAN]])
MASK = torch.tensor([[True, True, False, False], [True, False, False, False]])


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool)


@pytest.mark.parametrize(("mode", "expected"), [("token-mean", 4.0), ("sequence-mean", 5.0), ("fixed", 1.5)])
@pytest.mark.parametrize("padding", [0, 3])
def test_three_ways_to_average(mode, expected, padding):
    """Neither a wider batch nor rows that are padding change any of them."""
    token_losses = torch.nn.functional.pad(LOSSES, (0, padding, 0, padding), value=NAN)
    mask = torch.nn.functional.pad(MASK, (0, padding, 0, padding))
    assert losses.aggregate(token_losses, mask, mode, max_tokens=4).item() == expected


def test_micro_batches_add_up():
    parts = [torch.tensor([[2.0, 2, 2, 2]], requires_grad=True), torch.tensor([[6.0]], requires_grad=True)]
    found = sum(losses.aggregate(x, torch.ones_like(x, dtype=torch.bool), "token-mean", normalizer=5) for x in parts)
    found.backward()
    assert found.item() == pytest.approx(2.8)
    assert [x.grad.flatten().tolist() for x in parts] == [pytest.approx([0.2] * 4), pytest.approx([0.2])]


def test_denominators_count_what_their_mode_says():
    mask = torch.nn.functional.pad(MASK, (0, 5, 0, 2))
    assert losses.loss_denominator(mask, "token-mean").item() == 3
    assert losses.loss_denominator(mask, "sequence-mean").item() == 2
    assert losses.loss_denominator(mask, "fixed", max_tokens=4).item() == 8
    with pytest.raises(ValueError, match="max_tokens"):
        losses.aggregate(LOSSES, MASK, "fixed")
    assert losses.aggregate(LOSSES, MASK, "fixed", normalizer=torch.tensor(8)).item() == 1.5
    with pytest.raises(ValueError, match=r"token-mean.*'mean'"):
        losses.aggregate(LOSSES, MASK, "mean", normalizer=3)


@pytest.mark.parametrize("kind", losses.POLICY_LOSSES)
def test_before_the_first_update_the_ratio_is_one(kind):
    old = -torch.rand(4, 6)
    found = losses.policy_loss(old.clone(), old, torch.randn(4, 6), ones(4, 6), kind=kind)
    values = {name: value.item() for name, (value, _) in found.metrics.items()}
    assert values == {
        "policy/approx_kl": 0,
        "policy/clip_frac": 0,
        "policy/ratio_mean": 1,
        "policy/ratio_max": 1,
    }


@pytest.mark.parametrize("kind", losses.POLICY_LOSSES)
def test_on_policy_every_kind_has_the_policy_gradient(kind):
    old = -torch.rand(3, 5, dtype=torch.float64)
    advantages = torch.randn(3, 1, dtype=torch.float64).expand(3, 5)
    new = old.clone().requires_grad_()
    losses.policy_loss(new, old, advantages, ones(3, 5), kind=kind).loss.backward()
    torch.testing.assert_close(new.grad, -advantages / 15)


def test_a_clipped_token_has_no_gradient_and_dual_clip_bounds_the_rest():
    ratio = torch.tensor([[1.5, 1.5, 0.5, 0.5, 8.0]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, -1.0]])
    new = ratio.log().requires_grad_()
    found = losses.policy_loss(new, torch.zeros(1, 5), advantages, ones(1, 5), clip_high=0.3, dual_clip=3.0)
    found.loss.backward()
    assert (new.grad != 0).tolist() == [[False, True, True, False, False]]
    assert found.loss.item() == pytest.approx((-1.3 + 1.5 - 0.5 + 0.8 + 3.0) / 5)
    assert found.metrics["policy/clip_frac"][0].item() == pytest.approx(2 / 5)
    assert found.metrics["policy/dual_clip_frac"][0].item() == pytest.approx(1 / 5)


@pytest.mark.parametrize("kind", losses.POLICY_LOSSES)
@pytest.mark.parametrize("gap", [100.0, -100.0])
def test_a_huge_ratio_stays_finite(kind, gap):
    new = torch.full((2, 3), gap).requires_grad_()
    advantages = torch.tensor([[1.0] * 3, [-1.0] * 3])
    found = losses.policy_loss(new, torch.zeros(2, 3), advantages, ones(2, 3), kind=kind)
    found.loss.backward()
    assert found.loss.isfinite() and new.grad.isfinite().all()
    assert all(value.isfinite() for value, _ in found.metrics.values())


@pytest.mark.parametrize("kind", losses.POLICY_LOSSES)
def test_a_row_with_advantage_zero_adds_nothing(kind):
    new, old = -torch.rand(2, 3), -torch.rand(2, 3)
    advantages = torch.tensor([[1.0] * 3, [0.0] * 3])
    new.requires_grad_()
    both = losses.policy_loss(new, old, advantages, ones(2, 3), kind=kind, normalizer=3.0).loss
    both.backward()
    alone = losses.policy_loss(new[:1], old[:1], advantages[:1], ones(1, 3), kind=kind, normalizer=3.0).loss
    assert both.item() == pytest.approx(alone.item())
    assert new.grad[1].tolist() == [0, 0, 0]


def test_zero_weights_take_a_row_out():
    new = torch.full((2, 2), -0.5, requires_grad=True)
    weights = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    losses.policy_loss(new, torch.full((2, 2), -0.6), torch.ones(2, 2), ones(2, 2), weights=weights).loss.backward()
    assert new.grad[1].tolist() == [0, 0]
    assert new.grad[0].ne(0).all()


def every_loss(x: torch.Tensor, mask: torch.Tensor):
    """Name and value of each token loss of the module on the same tensor."""
    advantages = torch.ones_like(x).detach()
    for kind in losses.POLICY_LOSSES:
        for mode in losses.AGGREGATIONS:
            options = {"kind": kind, "aggregation": mode, "max_tokens": 8}
            yield f"{kind} {mode}", losses.policy_loss(x, x.detach() - 0.1, advantages, mask, **options)
    yield "value", losses.value_loss(x, x.detach() + 1, advantages, mask, clip=0.2)
    yield "entropy", losses.entropy_loss(x, mask)
    yield "sft", losses.sft_loss(x, mask)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (2, 3)], ids=str)
def test_nothing_to_learn_from_is_zero_with_gradient_zero(shape):
    mask = torch.zeros(shape, dtype=torch.bool)
    x = torch.full(shape, NAN, requires_grad=True)
    for name, found in every_loss(x, mask):
        x.grad = None
        found.loss.backward()
        assert found.loss.item() == 0, name
        assert x.grad.eq(0).all(), name
        assert all(weight.item() == 0 for _, weight in found.metrics.values()), name


def test_garbage_outside_the_mask_reaches_neither_loss_nor_gradient():
    clean, mask = -torch.rand(3, 4), torch.tensor([[True] * 4, [True, False, False, False], [False] * 4])
    for bad in (NAN, math.inf, -math.inf, 1e30):
        dirty = torch.where(mask, clean, bad).requires_grad_()
        tidy = torch.where(mask, clean, -1.0).requires_grad_()
        for (name, found), (_, expected) in zip(every_loss(dirty, mask), every_loss(tidy, mask), strict=True):
            torch.testing.assert_close(found.loss, expected.loss, msg=name)
            (gradient,) = torch.autograd.grad(found.loss, dirty)
            torch.testing.assert_close(gradient, torch.autograd.grad(expected.loss, tidy)[0], msg=name)


def test_nan_inside_the_mask_is_not_hidden():
    for name, found in every_loss(torch.tensor([[NAN, -1.0]], requires_grad=True), ones(1, 2)):
        assert found.loss.isnan(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_losses_are_float32_and_gradients_keep_their_dtype(dtype):
    x = -torch.rand(2, 3).to(dtype).requires_grad_()
    x.retain_grad()
    for name, found in every_loss(x, ones(2, 3)):
        x.grad = None
        found.loss.backward()
        assert found.loss.dtype == torch.float32, name
        assert x.grad.dtype == dtype, name


def test_label_rows_without_a_completion_token_change_nothing():
    """pad = eos = 2, prompt 5 6 7, completion 8 9 2: the mask comes from the lengths, so the end token is learnt."""
    labels = torch.tensor([[False] * 3 + [True] * 3 + [False] * 2])
    logprobs = -torch.rand(1, 8)
    alone = losses.sft_loss(logprobs, labels)
    assert alone.metrics["sft/nll"][1].item() == 3
    assert alone.loss.item() == pytest.approx(-logprobs[0, 3:6].mean().item())
    empty_beside = losses.sft_loss(logprobs.repeat(3, 1), torch.cat([labels, torch.zeros(2, 8, dtype=torch.bool)]))
    assert empty_beside.loss.item() == alone.loss.item()


def test_only_the_current_tensor_gets_gradient():
    x, other = -torch.rand(2, 3), torch.rand(2, 3).requires_grad_()
    x.requires_grad_()
    losses.policy_loss(x, other, other, ones(2, 3), weights=other).loss.backward()
    losses.value_loss(x, other, other, ones(2, 3), clip=0.2).loss.backward()
    assert other.grad is None and x.grad is not None


def test_wrong_shapes_and_options_are_refused():
    x = torch.zeros(2, 3)
    with pytest.raises(ShapeError, match=r"'advantages': \(2,\)"):
        losses.policy_loss(x, x, torch.zeros(2), ones(2, 3))
    with pytest.raises(ShapeError, match="weights"):
        losses.policy_loss(x, x, x, ones(2, 3), weights=torch.zeros(2, 1))
    with pytest.raises(ShapeError, match="returns"):
        losses.value_loss(x, x, torch.zeros(3, 2), ones(2, 3))
    for options, message in [
        ({"kind": "trpo"}, "ppo.*'trpo'"),
        ({"clip_low": -0.1}, "clip_low"),
        ({"clip_high": NAN}, "clip_high"),
        ({"dual_clip": 0.9}, "above 1"),
        ({"dual_clip": 3.0, "kind": "gspo"}, "belongs to 'ppo'"),
        ({"aggregation": "sum"}, "token-mean"),
    ]:
        with pytest.raises(ValueError, match=message):
            losses.policy_loss(x, x, x, ones(2, 3), **options)
    with pytest.raises(ValueError, match="value clip"):
        losses.value_loss(x, x, x, ones(2, 3), clip=0.0)
