"""Pair losses: where training starts, padding pairs, micro-batches, extreme scores, refused options."""

import math

import pytest
import torch

from engine.algorithms.preference import DPO_KINDS, bradley_terry_loss, cost_model_loss, dpo_loss
from engine.errors import ShapeError

NAN = math.nan
MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
FLAGS = torch.tensor([True, False, True])


def dpo(policy, kind="sigmoid", **options):
    """Chosen side from the policy tensor, everything else at -1."""
    rest = torch.full_like(policy, -1.0).detach()
    return dpo_loss(policy, rest, rest, rest, MASK[: len(policy)], MASK[: len(policy)], kind=kind, **options)


@pytest.mark.parametrize(
    ("kind", "expected"), [("sigmoid", math.log(2)), ("length-normalised", math.log(2)), ("ipo", 25)]
)
def test_the_policy_starts_as_its_reference(kind, expected):
    found = dpo(torch.full((3, 3), -1.0), kind)
    assert found.loss.item() == pytest.approx(expected)
    assert found.metrics["dpo/margin_mean"][0].item() == 0
    assert found.metrics["dpo/margin_mean"][1].item() == 2


@pytest.mark.parametrize("kind", DPO_KINDS)
def test_descent_raises_the_chosen_response(kind):
    policy = torch.where(MASK, -1.0, NAN).requires_grad_()
    dpo(policy, kind).loss.backward()
    assert (policy.grad[MASK] < 0).all()
    assert policy.grad[~MASK].eq(0).all()


@pytest.mark.parametrize("kind", DPO_KINDS)
def test_pairs_add_up_over_micro_batches(kind):
    policy = -torch.rand(3, 3)
    parts = [
        dpo_loss(
            *(x[row] for x in (policy, -policy, policy / 2, policy / 3)), MASK[row], MASK[row], kind=kind, normalizer=2
        )
        for row in (slice(0, 1), slice(1, 3))
    ]
    whole = dpo_loss(policy, -policy, policy / 2, policy / 3, MASK, MASK, kind=kind)
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item())


@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_extreme_scores_stay_finite(gap):
    chosen = torch.tensor([gap], requires_grad=True)
    found = bradley_terry_loss(chosen, torch.zeros(1))
    found.loss.backward()
    assert found.loss.item() == pytest.approx(max(-gap, 0.0))
    assert chosen.grad.item() == pytest.approx(-1.0 if gap < 0 else 0.0)


def scores(values):
    return torch.tensor(values, requires_grad=True)


def test_padding_pairs_count_nowhere():
    kept = torch.tensor([True, True, False])
    chosen, rejected = scores([1.0, -1.0, NAN]), scores([0.5, 0.5, math.inf])
    found = bradley_terry_loss(chosen, rejected, pair_mask=kept)
    found.loss.backward()
    assert found.loss.item() == pytest.approx(bradley_terry_loss(chosen[:2], rejected[:2]).loss.item())
    assert chosen.grad[2].item() == 0 and rejected.grad[2].item() == 0
    cost = cost_model_loss(chosen, rejected, FLAGS, FLAGS, pair_mask=kept)
    alone = cost_model_loss(chosen[:2], rejected[:2], FLAGS[:2], FLAGS[:2])
    assert cost.loss.item() == pytest.approx(alone.loss.item())
    assert {k: v[0].item() for k, v in cost.metrics.items()} == {k: v[0].item() for k, v in alone.metrics.items()}


@pytest.mark.parametrize("count", [0, 2])
def test_no_pair_is_zero_with_gradient_zero(count):
    x, none = torch.full((count,), NAN, requires_grad=True), torch.zeros(count, dtype=torch.bool)
    for found in (
        bradley_terry_loss(x, x, pair_mask=none),
        cost_model_loss(x, x, none, none, pair_mask=none),
        dpo_loss(*[x[:, None].expand(count, 4)] * 4, *[none[:, None].expand(count, 4)] * 2),
    ):
        x.grad = None
        found.loss.backward()
        assert found.loss.item() == 0 and x.grad.eq(0).all()
        assert all(weight.item() == 0 for _, weight in found.metrics.values())


def test_the_cost_of_a_safe_response_is_pushed_below_zero():
    worse, better = scores([0.0]), scores([0.0])
    cost_model_loss(worse, better, torch.tensor([True]), torch.tensor([False])).loss.backward()
    assert worse.grad.item() == pytest.approx(-1.0) and better.grad.item() == pytest.approx(1.0)


def test_refusals():
    with pytest.raises(ValueError, match=r"sigmoid.*'hinge'"):
        dpo(torch.zeros(3, 3), "hinge")
    with pytest.raises(ValueError, match="beta"):
        dpo(torch.zeros(3, 3), beta=0.0)
    with pytest.raises(ShapeError, match="rejected_scores"):
        bradley_terry_loss(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ShapeError, match="margin"):
        bradley_terry_loss(torch.zeros(2), torch.zeros(2), margin=torch.zeros(1))
    with pytest.raises(ShapeError, match="better_is_unsafe"):
        cost_model_loss(torch.zeros(3), torch.zeros(3), FLAGS, FLAGS[:2])
    with pytest.raises(ShapeError, match="rejected"):
        dpo_loss(*[torch.zeros(2, 3)] * 4, MASK[:2], MASK[:2, :2])
