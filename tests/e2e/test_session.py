"""The session alone: real trainer, real generation, real store, everything in this process."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ConfigError, DeviceMemoryError, DivergedError
from engine.metrics import OF_THE_MACHINE
from engine.session import Session
from engine.store import StepRef, step_path
from engine.workers.policy import PolicyWorker
from tests.helpers.runs import tiny_run

pytestmark = pytest.mark.e2e


def iterate(session: Session, data: StepRef, upto: int) -> StepRef:
    """Start checkpoint and iterations 1..upto; returns the last train step."""
    step = session.start(data)
    for iteration in range(1, upto + 1):
        step = session.train(iteration, session.rollout(iteration, step))
    return step


def outcome(session: Session, step: StepRef) -> tuple[Any, ...]:
    """What must be equal between two runs: weights and all metrics that are no times."""
    manifest = session.run.store.manifest(step)
    metrics = {name: value for name, value in manifest.metrics.items() if not name.startswith(OF_THE_MACHINE)}
    return manifest.facts["sha256"], metrics, manifest.facts["controllers"]


CASES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"name": "grpo"}},
    "grpo-kl": {"algorithm": {"name": "grpo", "kl_loss_coef": 0.1, "entropy_coef": 0.01}},
    "grpo-guarded": {"guards": [{"watch": "length", "above": 0.5, "action": "lower_rate"}]},
    "ppo": {"algorithm": {"name": "ppo", "kl_coef": 0.1, "kl_target": 0.5, "critic_warmup": 1}},
    "remax": {"algorithm": {"name": "remax"}},
    "dapo": {"algorithm": {"name": "dapo", "max_refills": 6}},
    "safe_rlhf-ptx": {"algorithm": {"name": "safe_rlhf", "ptx_coef": 0.5}, "cost": [{"kind": "exact_match"}]},
    "safe_rlhf": {"algorithm": {"name": "safe_rlhf", "critic_warmup": 1}, "cost": [{"kind": "exact_match"}]},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_an_interrupted_run_ends_exactly_like_one_that_was_not(tmp_path: Path, options: dict[str, Any]) -> None:
    run, data = tiny_run(tmp_path, "whole", **options)
    whole = Session(run)
    last = iterate(whole, data, 3)

    broken_run, broken_data = tiny_run(tmp_path, "broken", **options)
    first = Session(broken_run)
    step = iterate(first, broken_data, 1)
    first.rollout(2, step)
    first.close()
    second = Session(broken_run)
    resumed = iterate(second, broken_data, 3)

    assert outcome(second, resumed) == outcome(whole, last)
    warmup = options.get("algorithm", {}).get("critic_warmup", 0)
    assert run.store.manifest(last).facts["steps"] == 6 - 2 * warmup


def test_the_rate_of_the_policy_ends_near_0_also_where_the_critics_warm_up(tmp_path: Path) -> None:
    """Four steps of its own: 1, 3/4, 2/4 and 1/4 of the rate, of which an iteration shows the mean of two."""
    warming = {"name": "ppo", "critic_warmup": 1}
    run, data = tiny_run(tmp_path, "linear", algorithm=warming, train={"schedule": "linear"})
    iterate(Session(run), data, 3)
    steps = [run.store.committed(step_path("train", iteration)) for iteration in (1, 2, 3)]
    rates = [run.store.manifest(step).metrics.get("train/lr") for step in steps if step is not None]
    assert rates == [None, pytest.approx(0.875e-3), pytest.approx(0.375e-3)]


def test_a_guard_lowers_the_rate_from_the_next_iteration_on(tmp_path: Path) -> None:
    run, data = tiny_run(tmp_path, "guarded", guards=[{"watch": "length", "above": 0.5, "action": "lower_rate"}])
    iterate(Session(run), data, 3)
    steps = [run.store.committed(step_path("train", iteration)) for iteration in (1, 2, 3)]
    rates = [run.store.manifest(step).metrics["train/lr"] for step in steps if step is not None]
    assert rates == pytest.approx([1e-3, 5e-4, 2.5e-4])


def test_a_guard_that_stops_keeps_the_iteration_before(tmp_path: Path) -> None:
    stop = {"watch": "length", "above": 0.5, "action": "stop", "patience": 2}
    run, data = tiny_run(tmp_path, "stopped", guards=[stop])
    with pytest.raises(DivergedError, match="length"):
        iterate(Session(run), data, 3)
    assert run.store.committed(step_path("train", 1)) is not None
    assert run.store.committed(step_path("train", 2)) is None


def test_weights_are_carried_to_engines_that_do_not_see_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, data = tiny_run(tmp_path, "one-host")
    whole = Session(run)
    expected = outcome(whole, iterate(whole, data, 2))
    monkeypatch.setattr("engine.workers.rollout.is_here", lambda handle: False)
    carried_run, carried_data = tiny_run(tmp_path, "two-hosts")
    carried = Session(carried_run)
    assert outcome(carried, iterate(carried, carried_data, 2)) == expected


def test_weights_that_were_not_kept_are_made_again_from_the_experience(tmp_path: Path) -> None:
    run, data = tiny_run(tmp_path, "whole")
    whole = Session(run)
    last = iterate(whole, data, 3)

    sparse_run, sparse_data = tiny_run(tmp_path, "sparse", checkpoint={"every": 3})
    first = Session(sparse_run)
    step = iterate(first, sparse_data, 2)
    assert sparse_run.store.manifest(step).facts["weights"] is False
    first.close()
    second = Session(sparse_run)
    assert outcome(second, iterate(second, sparse_data, 3)) == outcome(whole, last)


def test_a_failed_step_leaves_the_workers_in_the_committed_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, data = tiny_run(tmp_path, "whole")
    expected = outcome(Session(run), iterate(Session(run), data, 3))

    failing_run, failing_data = tiny_run(tmp_path, "failing")
    session = Session(failing_run)
    step = iterate(session, failing_data, 1)
    experience = session.rollout(2, step)
    monkeypatch.setattr(
        "engine.session.Session._save", lambda self, folder: (_ for _ in ()).throw(OSError(28, "No space"))
    )
    with pytest.raises(Exception, match="No space"):
        session.train(2, experience)
    monkeypatch.undo()
    assert not list(failing_run.store.folder.glob(".tmp-*"))
    assert outcome(session, iterate(session, failing_data, 3)) == expected


def test_a_device_without_memory_is_given_half_the_micro_batch_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is done again with micro-batches of half the tokens, and its numbers are those of a roomy device."""
    budget = {"micro_batch_tokens": 80}
    run, data = tiny_run(tmp_path, "roomy", train=budget)
    roomy = Session(run)
    expected = run.store.manifest(iterate(roomy, data, 1))

    run, data = tiny_run(tmp_path, "tight", train=budget)
    session, update = Session(run), PolicyWorker._learn

    def with_little_memory(self: PolicyWorker, *arguments: Any) -> Any:
        if self.context.config.train.micro_batch_tokens > limit:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")
        return update(self, *arguments)

    limit = 40
    experience = session.rollout(1, session.start(data))
    monkeypatch.setattr(PolicyWorker, "_learn", with_little_memory)
    with pytest.raises(DeviceMemoryError, match="ran out of memory") as caught:
        session.train(1, experience)
    assert caught.value.retryable and caught.value.where == {"role": "policy", "rank": 0}
    found = run.store.manifest(session.train(1, experience))
    assert found.facts["micro_batch_tokens"] == 40
    for name, value in expected.metrics.items():
        if not name.startswith(OF_THE_MACHINE):
            assert found.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name

    limit = 20
    experience = session.rollout(2, session.train(1, experience))
    with pytest.raises(ConfigError, match=r"train\.micro_batch_tokens = 40"):
        session.train(2, experience)


def test_memory_and_utilisation_are_measured_in_both_halves(tmp_path: Path) -> None:
    run, data = tiny_run(tmp_path, "measured", algorithm={"name": "ppo", "kl_coef": 0.1})
    session = Session(run)
    experience = session.rollout(1, session.start(data))
    learned = session.train(1, experience)
    session.close()
    for step, area in ((experience, "perf/mfu_rollout"), (learned, "perf/mfu_train")):
        metrics = run.store.manifest(step).metrics
        assert 0 < metrics[area] < 1
        for role in ("policy", "critic", "reference", "reward", "rollout"):
            assert 0.01 < metrics[f"memory/{role}_peak_gib"] < 100
        assert not [name for name in metrics if name.endswith("_resources_s")]


def test_evaluation_reports_rows_and_scores(tmp_path: Path) -> None:
    run, data = tiny_run(tmp_path)
    session = Session(run)
    start = session.start(data)
    report = run.store.manifest(session.evaluate(0, start)).facts["suites"]["held_out"]
    assert report["rows"] == 5
    assert report["unscored"] == 0
    assert 0.0 <= report["score_mean"] <= 1.0
    assert session.evaluate(0, start) == session.evaluate(0, start)


def test_retention_keeps_the_newest_and_the_chain_stays_verifiable(tmp_path: Path) -> None:
    run, data = tiny_run(tmp_path, checkpoint={"keep_last": 1})
    session = Session(run)
    last = iterate(session, data, 3)
    pruned = run.store.committed(step_path("train", 1))
    assert pruned is not None and run.store.is_pruned(pruned)
    assert not run.store.is_pruned(last)
    assert iterate(Session(run), data, 3) == last
    experience = run.store.committed(step_path("rollout", 2))
    assert experience is not None
    assert run.store.manifest(experience).parent == pruned.manifest_sha256


def test_samples_differ_between_seeds_and_groups(tmp_path: Path) -> None:
    texts = []
    for seed in (1, 2):
        run, data = tiny_run(tmp_path, f"seed-{seed}", seed=seed, sft=None)
        session = Session(dataclasses.replace(run))
        experience = session.rollout(1, session.start(data))
        from engine.experience import load_experience

        batch = load_experience(run.store.read(experience))
        texts.append(batch.column("response"))
        assert len(set(batch.column("response")[:4])) > 1
        assert sorted(set(batch.group_ids.tolist())) == [0, 1, 2, 3]
    assert texts[0] != texts[1]
