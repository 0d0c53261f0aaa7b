"""Counter-based seeds and the endless stream of epochs."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.seeds import derive, permutation, stream_rows

pytestmark = pytest.mark.unit


def test_a_seed_depends_on_every_part_and_on_nothing_else() -> None:
    seeds = {
        derive(7, "sample", 1, 2),
        derive(8, "sample", 1, 2),
        derive(7, "other", 1, 2),
        derive(7, "sample", 12),
        derive(7, "sample", "1", 2),
    }
    assert len(seeds) == 5
    assert derive(7, "sample", 1, 2) == derive(7, "sample", 1, 2)
    assert all(0 <= seed < 2**63 for seed in seeds)


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 13), batch=st.integers(1, 20))
def test_every_epoch_is_a_permutation_whatever_the_batch_size(size: int, batch: int) -> None:
    steps = 3 * size
    rows = [row for step in range(steps) for row in stream_rows(size, batch, step, 5)]
    for epoch in range(steps * batch // size):
        assert sorted(rows[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_the_last_partial_batch_is_trained_not_dropped() -> None:
    first, second = stream_rows(5, 4, 0, 1), stream_rows(5, 4, 1, 1)
    assert Counter(first + second[:1]) == Counter(range(5))


def test_epochs_differ_and_a_step_needs_no_history() -> None:
    assert permutation(50, 1, 0).tolist() != permutation(50, 1, 1).tolist()
    assert stream_rows(10, 2, 8, 3) == stream_rows(10, 2, 8, 3)
