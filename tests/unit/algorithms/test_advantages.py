"""Advantages: known numbers, unscored samples, dead groups, cut responses, gaps in the mask, empty batches."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.algorithms import advantages
from engine.algorithms.masked import scored_mask
from engine.errors import ShapeError

NAN = math.nan
GROUPED = {
    "grpo": advantages.grpo,
    "dr_grpo": lambda *a: advantages.grpo(*a, scale="none"),
    "rloo": advantages.rloo,
    "opo": advantages.opo,
    "gpg": advantages.gpg,
    "reinforce_plus_plus_baseline": advantages.reinforce_plus_plus_baseline,
}
# Whitening comes last there, so that a dead group ends at minus the batch mean.
EXACT_ZERO = [name for name in GROUPED if name != "reinforce_plus_plus_baseline"]


def ones(rows: int, width: int = 1) -> torch.Tensor:
    return torch.ones(rows, width, dtype=torch.bool)


def flat(advantage: torch.Tensor) -> list[float]:
    return advantage[:, 0].tolist()


# Two groups of four, interleaved: one without spread, one with two right answers.
IDS = torch.tensor([5, 2, 5, 2, 5, 2, 5, 2])
SCORES = torch.tensor([1.0, 1, 1, 0, 1, 0, 1, 1])


@pytest.mark.parametrize("name", EXACT_ZERO)
@pytest.mark.parametrize("score", [1.0, 0.1, -7.7, 1e8])
def test_a_group_without_spread_gives_exact_zeros(name, score):
    found = GROUPED[name](torch.full((3,), score), torch.zeros(3, dtype=torch.int64), ones(3, 2))
    assert found.tolist() == [[0, 0]] * 3


@pytest.mark.parametrize(("name", "size"), [("grpo", 0.866025), ("dr_grpo", 0.5), ("rloo", 0.666667), ("gpg", 1.0)])
def test_a_dead_group_beside_a_living_one(name, size):
    expected = [0, size, 0, -size, 0, -size, 0, size]
    assert flat(GROUPED[name](SCORES, IDS, ones(8))) == pytest.approx(expected, abs=2e-6)


def test_group_metrics_count_dead_groups_and_missing_scores():
    metrics = advantages.group_metrics(SCORES, IDS)
    assert {name: (v.item(), w.item()) for name, (v, w) in metrics.items()} == {
        "reward/zero_spread_share": (0.5, 2),
        "reward/unscored_count": (0, 1),
        "reward/unscored_group_count": (0, 1),
    }
    scores = torch.tensor([NAN, NAN, 1.0, math.inf, 2.0, 3.0])
    metrics = advantages.group_metrics(scores, torch.tensor([0, 0, 1, 1, 4, 4]))
    assert {name: (v.item(), w.item()) for name, (v, w) in metrics.items()} == {
        "reward/zero_spread_share": (0.5, 2),
        "reward/unscored_count": (3, 1),
        "reward/unscored_group_count": (1, 1),
    }


@pytest.mark.parametrize("missing", [NAN, math.inf, -math.inf])
def test_an_unscored_sample_leaves_the_baseline(missing):
    scores, ids = torch.tensor([1.0, 0.0, missing, 1.0]), torch.zeros(4, dtype=torch.int64)
    expected = [0.577350, -1.154701, 0, 0.577350]
    assert flat(advantages.grpo(scores, ids, ones(4))) == pytest.approx(expected, abs=3e-6)
    for estimator in GROUPED.values():
        with_missing = estimator(scores, ids, ones(4, 3))
        alone = estimator(scores[[0, 1, 3]], ids[:3], ones(3, 3))
        assert with_missing[2].tolist() == [0, 0, 0]
        if estimator is not advantages.gpg:
            torch.testing.assert_close(with_missing[[0, 1, 3]], alone)


def test_gpg_gives_back_the_gradient_of_an_unscored_sample():
    scores, ids = torch.tensor([1.0, 0.0, NAN, 1.0]), torch.zeros(4, dtype=torch.int64)
    expected = [4 / 3 * x for x in (1 / 3, -2 / 3, 0, 1 / 3)]
    assert flat(advantages.gpg(scores, ids, ones(4))) == pytest.approx(expected)


@pytest.mark.parametrize("name", GROUPED)
def test_groups_without_any_or_with_one_score_give_zeros(name):
    ids = torch.zeros(3, dtype=torch.int64)
    assert GROUPED[name](torch.full((3,), NAN), ids, ones(3, 2)).tolist() == [[0, 0]] * 3
    assert GROUPED[name](torch.tensor([NAN, 2.0, NAN]), ids, ones(3, 2)).tolist() == [[0, 0]] * 3


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)], ids=str)
def test_empty_batches(name, shape):
    scores, ids = torch.arange(float(shape[0])), torch.zeros(shape[0], dtype=torch.int64)
    assert GROUPED[name](scores, ids, torch.ones(shape, dtype=torch.bool)).shape == shape


@pytest.mark.parametrize("name", GROUPED)
def test_a_row_without_response_tokens_still_has_a_score(name):
    mask = torch.tensor([[True, True], [False, False], [True, False]])
    found = GROUPED[name](torch.tensor([1.0, 3.0, 2.0]), torch.zeros(3, dtype=torch.int64), mask)
    assert torch.isfinite(found).all()
    assert found[~mask].tolist() == [0, 0, 0]


@settings(max_examples=40)
@given(data=st.data())
def test_permuting_samples_permutes_advantages(data):
    size = data.draw(st.integers(1, 12))
    scores = torch.tensor(
        data.draw(st.lists(st.sampled_from([0.0, 1.0, 0.5, -2.0, NAN]), min_size=size, max_size=size))
    )
    ids = torch.tensor(data.draw(st.lists(st.integers(-3, 3), min_size=size, max_size=size)))
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size)))
    order = torch.tensor(data.draw(st.permutations(range(size))))
    mask = torch.arange(4) < lengths[:, None]
    for estimator in GROUPED.values():
        here, there = estimator(scores, ids, mask), estimator(scores[order], ids[order], mask[order])
        torch.testing.assert_close(here[order], there, rtol=1e-5, atol=1e-5)
        wider = estimator(scores, ids, torch.nn.functional.pad(mask, (0, 3)))
        torch.testing.assert_close(wider[:, :4], here, rtol=1e-5, atol=1e-5)
        assert wider[:, 4:].eq(0).all()


REWARDS, VALUES = torch.tensor([[0.0, 0, 1]]), torch.tensor([[0.5, 0.6, 0.7]])


def test_a_response_that_ended_and_one_cut_by_length():
    rewards, values = REWARDS.expand(2, 3), VALUES.expand(2, 3)
    found, returns = advantages.gae(
        rewards, values, ones(2, 3), gamma=1.0, lam=0.95, bootstrap_values=torch.tensor([NAN, 0.8])
    )
    expected = torch.tensor([[0.465750, 0.385, 0.3], [1.187750, 1.145, 1.1]])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(returns, expected + values, rtol=0, atol=1e-6)
    ended, _ = advantages.gae(REWARDS, VALUES, ones(1, 3), gamma=1.0, lam=0.95)
    torch.testing.assert_close(ended, found[:1], rtol=0, atol=0)


def test_padding_does_not_move_the_cut():
    """The value after a cut response is bootstrapped at its own last token, however wide the batch is."""
    garbage = torch.full((1, 4), NAN)
    wide = advantages.gae(
        torch.cat([REWARDS, garbage], 1),
        torch.cat([VALUES, garbage], 1),
        torch.tensor([[True] * 3 + [False] * 4]),
        gamma=1.0,
        lam=0.95,
        bootstrap_values=torch.tensor([0.8]),
    )
    assert wide[0][0].tolist() == pytest.approx([1.187750, 1.145, 1.1, 0, 0, 0, 0], abs=1e-6)
    assert wide[1][0, 3:].tolist() == [0] * 4


def test_tool_text_between_tokens_is_stepped_over():
    gap = torch.tensor([[True, False, True, False, True]])
    rewards, values = torch.full((1, 5), 9.0), torch.full((1, 5), -9.0)
    rewards[gap], values[gap] = REWARDS[0], VALUES[0]
    found, _ = advantages.gae(rewards, values, gap, gamma=0.9, lam=0.95)
    without, _ = advantages.gae(REWARDS, VALUES, ones(1, 3), gamma=0.9, lam=0.95)
    assert found[gap].tolist() == without[0].tolist()
    assert found[~gap].tolist() == [0, 0]


def test_an_unscored_row_learns_nothing_and_shifts_nobody():
    rewards = torch.tensor([[0.0, 0, 1], [0.0, 0, NAN], [0.3, 0, 2]])
    values = VALUES.expand(3, 3).clone().requires_grad_()
    found, returns = advantages.gae(rewards, values, ones(3, 3), gamma=1.0, lam=0.95)
    assert found[1].tolist() == [0, 0, 0]
    assert returns[1].tolist() == values[1].tolist()
    assert not found.requires_grad
    white = advantages.reinforce_plus_plus(rewards, ones(3, 3))
    torch.testing.assert_close(white[[0, 2]], advantages.reinforce_plus_plus(rewards[[0, 2]], ones(2, 3)))
    assert white[1].tolist() == [0, 0, 0]
    assert scored_mask(rewards[:, -1], ones(3, 3)).any(-1).tolist() == [True, False, True]


def test_a_critic_that_is_not_finite_stays_visible():
    found, _ = advantages.gae(REWARDS, torch.tensor([[0.5, NAN, 0.7]]), ones(1, 3), gamma=1.0, lam=0.95)
    assert found.isnan().any()


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)], ids=str)
def test_token_estimators_take_empty_batches(shape):
    x, mask = torch.zeros(shape), torch.ones(shape, dtype=torch.bool)
    found, returns = advantages.gae(x, x, mask, gamma=1.0, lam=0.95, bootstrap_values=torch.zeros(shape[0]))
    assert found.shape == returns.shape == shape
    assert advantages.reinforce_plus_plus(x, mask).shape == shape


def test_the_overlong_penalty_is_zero_then_linear():
    lengths = torch.tensor([0, 60, 80, 85, 90, 100])
    found = advantages.overlong_penalty(lengths, max_tokens=100, buffer=20)
    assert found.tolist() == pytest.approx([0, 0, 0, -0.25, -0.5, -1])
    assert found.dtype == torch.float32
    with pytest.raises(ValueError, match=r"1\.\.100.*0"):
        advantages.overlong_penalty(lengths, max_tokens=100, buffer=0)


def test_wrong_shapes_and_options_are_refused():
    with pytest.raises(ShapeError, match=r"\(2,\) and \(3,\)"):
        advantages.grpo(torch.zeros(2), torch.zeros(3), ones(2))
    with pytest.raises(ShapeError, match=r"\[3\].*\(2,\)"):
        advantages.rloo(torch.zeros(2), torch.zeros(2), ones(3))
    with pytest.raises(ShapeError, match="greedy_scores"):
        advantages.remax(torch.zeros(2), torch.zeros(1), ones(2))
    with pytest.raises(ShapeError, match="bootstrap_values"):
        advantages.gae(REWARDS, VALUES, ones(1, 3), gamma=1, lam=1, bootstrap_values=torch.zeros(2))
    with pytest.raises(ShapeError, match="values"):
        advantages.gae(REWARDS, VALUES[:, :2], ones(1, 3), gamma=1, lam=1)
    with pytest.raises(ValueError, match="'std' or 'none'"):
        advantages.grpo(torch.zeros(2), torch.zeros(2), ones(2), scale="max")
