"""The session alone: real trainer, real generation, real store, everything in this process."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from engine.session import Session
from engine.store import StepRef, step_path
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
    metrics = {name: value for name, value in manifest.metrics.items() if not name.startswith("time/")}
    return manifest.facts["sha256"], metrics, manifest.facts["controllers"]


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "grpo"},
        {"name": "grpo", "kl_loss_coef": 0.1, "entropy_coef": 0.01},
        {"name": "ppo", "kl_coef": 0.1, "kl_target": 0.5, "critic_warmup": 1},
    ],
    ids=["grpo", "grpo-kl", "ppo"],
)
def test_an_interrupted_run_ends_exactly_like_one_that_was_not(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    run, data = tiny_run(tmp_path, "whole", algorithm=algorithm)
    whole = Session(run)
    last = iterate(whole, data, 3)

    broken_run, broken_data = tiny_run(tmp_path, "broken", algorithm=algorithm)
    first = Session(broken_run)
    step = iterate(first, broken_data, 1)
    first.rollout(2, step)
    first.close()
    second = Session(broken_run)
    resumed = iterate(second, broken_data, 3)

    assert outcome(second, resumed) == outcome(whole, last)
    assert run.store.manifest(last).facts["steps"] == (6 if algorithm["name"] == "grpo" else 4)


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
