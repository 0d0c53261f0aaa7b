"""A run on fixed rows learns the same on two ranks as on one, whatever the micro-batches; a reward model scores the same."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.experience import load_experience
from engine.offline_session import OfflineSession
from engine.runs import policy_folder
from engine.session import Session
from tests.helpers.offline import offline_run, score_model
from tests.helpers.runs import tiny_run

QUIET = ("/accuracy", "/margin_mean", "grad_norm", "/nll")  # metrics that must agree


def learned(root: Path, key: str, objective: str, **sections: Any) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics and weights after three optimiser steps."""
    run, data = offline_run(root, key, objective, steps=3, **sections)
    session = OfflineSession(run)
    try:
        step = session.train(3, session.start(data))
    finally:
        session.close()
    metrics = {name: value for name, value in run.store.manifest(step).metrics.items() if name.endswith(QUIET)}
    # In the first step policy and reference agree, and which of a pair is ahead is decided by the last bits.
    metrics.pop("dpo/accuracy", None)
    return metrics, load_file(policy_folder(run, step) / "model.safetensors")


@pytest.mark.parametrize("objective", ["sft", "dpo", "reward_model", "cost_model"])
def test_micro_batches_change_nothing(tmp_path: Path, objective: str) -> None:
    metrics, weights = learned(tmp_path, "whole", objective)
    parts, others = learned(tmp_path, "parts", objective, train={"micro_batch_tokens": 20})
    assert parts == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    for name, tensor in weights.items():
        assert (tensor - others[name]).abs().max() < 2e-4, name


@pytest.mark.parametrize("objective", ["dpo", "reward_model"])
def test_two_ranks_learn_what_one_learns(tmp_path: Path, objective: str) -> None:
    """Seven pairs in a batch: one rank has more than the other."""
    metrics, weights = learned(tmp_path, "one", objective, train={"batch_size": 7})
    placement = {"mode": "colocate", "ranks": 2}
    both, others = learned(tmp_path, "two", objective, train={"batch_size": 7}, placement=placement)
    assert both == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    for name, tensor in weights.items():
        assert (tensor - others[name]).abs().max() < 2e-4, name


def scores_of(root: Path, key: str, **sections: Any) -> torch.Tensor:
    """Scores of the first rollout of a run that learns from a reward model."""
    folder = root / "ranker"
    if not folder.exists():
        score_model(folder)
    run, data = tiny_run(root, key, reward=[{"kind": "model", "source": str(folder)}], **sections)
    session = Session(dataclasses.replace(run, models={"reward[0]": folder}))
    try:
        experience = session.rollout(1, session.start(data))
    finally:
        session.close()
    return load_experience(run.store.read(experience)).scores


@pytest.mark.parametrize("backend", ["torch", "fsdp"])
def test_two_ranks_score_what_one_scores(tmp_path: Path, backend: str) -> None:
    expected = scores_of(tmp_path, "one", train={"prompts_per_iteration": 5, "mini_batches": 1})
    placement = {"mode": "colocate", "ranks": 2}
    train = {"prompts_per_iteration": 5, "mini_batches": 1, "backend": backend}
    found = scores_of(tmp_path, "two", train=train, placement=placement)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert expected.std() > 0.01
