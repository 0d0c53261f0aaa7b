"""Every algorithm is seen to learn the toy task, and seen not to when the sign of its advantages is flipped."""

import typing
from pathlib import Path
from typing import Any

import pytest

from engine.config import AlgorithmConfig
from engine.controller.local_group import LocalGroup
from tests.helpers.learning import BackwardsPolicy, Outcome, learn_toy, toy_config

MARGIN = 0.25  # least rise of the mean score, which starts near 0.09
LIMIT = 0.1  # of the mean cost; it starts near 0.04, and ends above 0.2 where nothing holds it
KNOWN = {section.model_fields["name"].default for section in typing.get_args(typing.get_args(AlgorithmConfig)[0])}
CONSTRAINED = {"safe_rlhf", "safe_grpo"}
PLAIN = sorted(KNOWN - CONSTRAINED - {"custom"})
UNHELD = {"multiplier_init": 1e-6, "multiplier_lr": 0.0}
OTHER_FORMS: dict[str, dict[str, Any]] = {
    "rloo without a ratio": {"name": "rloo", "loss": "reinforce"},
    "grpo near its start": {"name": "grpo", "kl_loss_coef": 0.01, "entropy_coef": 0.001},
    "ppo near its start": {"name": "ppo", "kl_coef": 0.01, "kl_target": 2.0, "dual_clip": 3.0},
    "dapo with a price on length": {"name": "dapo", "overlong_buffer": 3, "max_refills": 1},
}

pytestmark = pytest.mark.learning


def several_steps(algorithm: dict[str, Any]) -> dict[str, Any]:
    """Two optimiser steps per iteration, so that ratios leave 1, where the algorithm allows it."""
    return {"train": {"mini_batches": 1 if algorithm["name"] == "opo" else 2}}


def learned(source: Path, scorers: dict[str, LocalGroup], algorithm: dict[str, Any]) -> Outcome:
    return learn_toy(toy_config(source, algorithm, **several_steps(algorithm)), source, scorers)


def learned_backwards(source: Path, scorers: dict[str, LocalGroup], algorithm: dict[str, Any]) -> Outcome:
    """Half as long: further on, no sample scores any more and dynamic sampling stops the run."""
    config = toy_config(source, algorithm, iterations=10, **several_steps(algorithm))
    return learn_toy(config, source, scorers, policy=BackwardsPolicy)


@pytest.mark.parametrize("algorithm", [{"name": name} for name in PLAIN], ids=PLAIN)
def test_the_score_rises_and_with_the_sign_flipped_it_does_not(
    source: Path, scorers: dict[str, LocalGroup], algorithm: dict[str, Any]
) -> None:
    right = learned(source, scorers, algorithm)
    assert right.end >= right.start + MARGIN, right
    wrong = learned_backwards(source, scorers, algorithm)
    assert wrong.start == right.start, "both begin with the same policy and the same samples"
    assert wrong.end <= wrong.start, wrong


@pytest.mark.parametrize("algorithm", OTHER_FORMS.values(), ids=OTHER_FORMS)
def test_other_forms_learn_too(source: Path, scorers: dict[str, LocalGroup], algorithm: dict[str, Any]) -> None:
    outcome = learned(source, scorers, algorithm)
    assert outcome.end >= outcome.start + MARGIN, outcome


@pytest.mark.parametrize("name", sorted(CONSTRAINED))
def test_the_score_rises_under_the_limit_on_cost(source: Path, scorers: dict[str, LocalGroup], name: str) -> None:
    held = learned(source, scorers, {"name": name, "cost_limit": LIMIT})
    assert held.end >= held.start + MARGIN and held.end_cost <= LIMIT, held
    assert held.controllers["log_multiplier"] != 0.0, "lambda starts at 1 and moves"
    unheld = learned(source, scorers, {"name": name, "cost_limit": LIMIT, **UNHELD})
    assert unheld.end >= unheld.start + MARGIN and unheld.end_cost > LIMIT, unheld
    wrong = learned_backwards(source, scorers, {"name": name, "cost_limit": LIMIT})
    assert not (wrong.end >= wrong.start + MARGIN and wrong.end_cost <= LIMIT), wrong


def test_the_adaptive_coefficient_moves(source: Path, scorers: dict[str, LocalGroup]) -> None:
    outcome = learned(
        source, scorers, {"name": "reinforce_plus_plus", "kl_coef": 0.01, "kl_target": 0.1, "kl_horizon": 100}
    )
    assert outcome.controllers["kl_coef"] > 0.02, "the policy leaves its start by more than the target"
