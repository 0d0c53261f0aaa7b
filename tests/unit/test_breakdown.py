"""Where the time of an iteration went, from manifests as runs write them; every figure worked out by hand."""

import pytest

from benchmarks.breakdown import iteration
from engine.controller.group import Span, busy_seconds
from engine.store import Manifest


def manifest(committed_at: float, sealed_s: float = 0.0, **times: float) -> Manifest:
    metrics = {f"time/{name}_s": value for name, value in times.items()}
    return Manifest("path", "digest", None, {}, metrics=metrics, committed_at=committed_at, sealed_s=sealed_s)


def test_what_overlaps_counts_once_and_gaps_do_not_count():
    spans = [Span(10.0, 2.0), Span(11.0, 3.0), Span(11.5, 0.5), Span(20.0, 1.0)]
    assert busy_seconds(spans) == pytest.approx(5.0)
    assert busy_seconds(spans[::-1]) == pytest.approx(5.0)
    assert busy_seconds([]) == 0.0


def test_the_rest_of_an_iteration_is_named_and_adds_up():
    """Reference and critic score beside each other: 4 s of phases in 3 s of work. Weights are written in this iteration."""
    rollout = manifest(
        106.0, 0.25, busy=3.0, step=4.0, rollout_generate=1.0, reference_compute_logprobs=2.0, critic=1.0
    )
    train = manifest(110.0, 0.5, busy=2.5, step=3.0, policy_update=2.0, policy_save=0.5)
    found = iteration(manifest(100.0), rollout, train)
    assert (found.wall, found.work) == (10.0, 5.0)
    assert list(found.overhead.values()) == [0.5, 1.5, 0.75, 2.25]
    assert found.work + sum(found.overhead.values()) == found.wall
    assert set(found.phases) == {
        "rollout_generate",
        "reference_compute_logprobs",
        "critic",
        "policy_update",
        "policy_save",
    }


def test_an_iteration_that_wrote_no_weights_has_no_time_for_it():
    found = iteration(manifest(0.0), manifest(1.0, busy=0.5, step=0.5), manifest(2.0, busy=1.0, step=1.0))
    assert list(found.overhead.values()) == [0.0, 0.0, 0.0, 0.5]
