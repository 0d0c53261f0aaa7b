"""Order of samples, padding and the cut into micro-batches leave every loss, gradient and metric unchanged."""

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.algorithms import losses
from engine.algorithms.correction import rollout_weights

MAX_TOKENS = 9
FIELDS = ("current", "old", "target")


@st.composite
def batches(draw):
    """Ragged float64 fields [B, R]; some rows may be empty, and so may the whole batch."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    fields = {name: torch.randn(mask.shape, generator=generator, dtype=torch.float64) for name in FIELDS}
    return {"mask": mask, **fields}


def policy(kind, mode, batch, normalizer):
    return losses.policy_loss(
        batch["current"],
        batch["old"],
        batch["target"],
        batch["mask"],
        kind=kind,
        aggregation=mode,
        normalizer=normalizer,
        max_tokens=MAX_TOKENS,
    )


def value(batch, normalizer):
    return losses.value_loss(
        batch["current"], batch["old"], batch["target"], batch["mask"], clip=0.3, normalizer=normalizer
    )


def sft(batch, normalizer):
    return losses.sft_loss(batch["current"], batch["mask"], normalizer=normalizer)


CASES = {
    **{
        f"{kind} {mode}": (functools.partial(policy, kind, mode), mode)
        for kind in losses.POLICY_LOSSES
        for mode in losses.AGGREGATIONS
    },
    "value": (value, "token-mean"),
    "sft": (sft, "token-mean"),
}


def run(loss_of, batch, normalizer=None):
    """Loss, gradient to `current`, metrics."""
    current = batch["current"].clone().requires_grad_()
    found = loss_of({**batch, "current": current}, normalizer)
    found.loss.backward()
    return found.loss.detach(), current.grad, found.metrics


def select(batch, rows):
    return {name: x[rows] for name, x in batch.items()}


def combine(parts):
    """Metrics of several calls as one, by the rule of masked.Metric."""
    result = {}
    for name in parts[0]:
        values = torch.stack([part[name][0].double() for part in parts])
        weights = torch.stack([part[name][1].double() for part in parts])
        total = weights.sum()
        if name.endswith("_max"):
            result[name] = values[weights > 0].max() if total else values.new_zeros(())
        else:
            result[name] = (values * weights).sum() / total if total else values.new_zeros(())
    return result


def same(found, expected, message):
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, check_dtype=False, msg=message)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=25)
@given(batch=batches(), data=st.data())
def test_order_padding_and_cuts_change_nothing(name, batch, data):
    loss_of, mode = CASES[name]
    loss, gradient, metrics = run(loss_of, batch)
    whole = combine([metrics])

    order = torch.tensor(data.draw(st.permutations(range(len(batch["mask"])))))
    moved_loss, moved_gradient, moved_metrics = run(loss_of, select(batch, order))
    same(moved_loss, loss, "order: loss")
    same(moved_gradient, gradient[order], "order: gradient")
    same(combine([moved_metrics]), whole, "order: metrics")

    wide = {key: torch.nn.functional.pad(x, (0, 3, 0, 2)) for key, x in batch.items()}
    wide_loss, wide_gradient, wide_metrics = run(loss_of, wide)
    same(wide_loss, loss, "padding: loss")
    same(wide_gradient, torch.nn.functional.pad(gradient, (0, 3, 0, 2)), "padding: gradient")
    same(combine([wide_metrics]), whole, "padding: metrics")

    cuts = sorted(data.draw(st.lists(st.integers(0, len(order)), max_size=3)))
    bounds = [0, *cuts, len(order)]
    parts = [select(batch, slice(a, b)) for a, b in itertools.pairwise(bounds)]
    normalizer = sum(losses.loss_denominator(part["mask"], mode, max_tokens=MAX_TOKENS) for part in parts)
    results = [run(loss_of, part, normalizer) for part in parts]
    same(sum(part[0] for part in results), loss, "cut: loss")
    same(torch.cat([part[1] for part in results]), gradient, "cut: gradient")
    same(combine([part[2] for part in results]), whole, "cut: metrics")


@settings(max_examples=40)
@given(batch=batches(), mode=st.sampled_from(["none", "token", "icepop", "sequence", "geometric"]), data=st.data())
def test_rollout_weights_look_at_one_row_at_a_time(batch, mode, data):
    order = torch.tensor(data.draw(st.permutations(range(len(batch["mask"])))))
    weights, metrics = rollout_weights(batch["current"], batch["old"], batch["mask"], mode=mode)
    moved = select(batch, order)
    moved_weights, _ = rollout_weights(moved["current"], moved["old"], moved["mask"], mode=mode)
    same(moved_weights, weights[order], "order")
    singles = [
        rollout_weights(*(batch[key][row : row + 1] for key in ("current", "old", "mask")), mode=mode)
        for row in range(len(order))
    ]
    same(torch.cat([single[0] for single in singles]), weights, "one row at a time")
    whole, combined = combine([metrics]), combine([single[1] for single in singles])
    for name in whole.keys() - {"rollout/ess_share"}:
        same(combined[name], whole[name], name)
