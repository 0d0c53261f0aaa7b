"""What an iteration of each dataflow asks of which role: the loop as the paper writes it, and no more."""

from pathlib import Path
from typing import Any

import pytest

from engine.controller.group import Pending
from engine.controller.local_group import LocalGroup
from engine.controller.worker import WorkerContext
from engine.errors import DivergedError
from engine.workers.reward import RewardWorker
from tests.helpers.learning import learn_toy, toy_config

PPO = [
    "rollout.generate",
    "reward.score",
    "policy.compute_logprobs",
    "critic.compute_values",
    "reference.compute_logprobs",
    "critic.update",
    "policy.update",
]
GRPO = ["rollout.generate", "reward.score", "policy.compute_logprobs", "policy.update"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every call of the controller that is no loading, hand-over or measuring, in order."""
    made: list[str] = []
    submit = LocalGroup.submit
    outside = ("load", "save", "publish", "receive", "retract")

    def noted(self: LocalGroup, method: Any, *arguments: Any) -> Pending:
        if method.__name__ not in outside:
            made.append(f"{self.role}.{method.__name__}")
        return submit(self, method, *arguments)

    monkeypatch.setattr(LocalGroup, "submit", noted)
    return made


def of_one_iteration(source: Path, scorers: dict[str, LocalGroup], calls: list[str], **algorithm: Any) -> list[str]:
    learn_toy(toy_config(source, algorithm, iterations=1), source, scorers)
    measured = 3 if str(algorithm["name"]).startswith("safe") else 2  # before and after: generate, score and costs
    return calls[measured:-measured]


def test_ppo_takes_seven_calls(source: Path, scorers: dict[str, LocalGroup], calls: list[str]) -> None:
    assert of_one_iteration(source, scorers, calls, name="ppo", kl_coef=0.01) == PPO


def test_grpo_takes_four(source: Path, scorers: dict[str, LocalGroup], calls: list[str]) -> None:
    assert of_one_iteration(source, scorers, calls, name="grpo") == GRPO


def test_remax_adds_one_greedy_generation_and_its_scores(
    source: Path, scorers: dict[str, LocalGroup], calls: list[str]
) -> None:
    assert of_one_iteration(source, scorers, calls, name="remax") == ["rollout.generate_greedy", "reward.score", *GRPO]


def test_safe_rlhf_adds_three_calls_to_ppo(source: Path, scorers: dict[str, LocalGroup], calls: list[str]) -> None:
    made = of_one_iteration(source, scorers, calls, name="safe_rlhf", kl_coef=0.01)
    assert sorted(made) == sorted([*PPO, "cost.score", "cost_critic.compute_values", "cost_critic.update"])


def test_dapo_draws_again_and_again_until_its_limit(
    source: Path, scorers: dict[str, LocalGroup], calls: list[str]
) -> None:
    """Groups of two samples seldom differ in the share of digits at the start, so that draws are needed."""
    config = {"name": "dapo", "max_refills": 2}
    learn_toy(toy_config(source, config, iterations=1, rollout={"samples_per_prompt": 2}), source, scorers)
    assert 2 <= calls[2:-2].count("rollout.generate") <= 3
    assert calls[2:-2].count("policy.compute_logprobs") == 1, "only of the samples that are learned from"


def test_dapo_stops_where_no_prompt_teaches(source: Path, scorers: dict[str, LocalGroup]) -> None:
    """With an answer that nobody gives, every group has the same score throughout."""
    config = toy_config(source, {"name": "dapo"}, reward=[{"kind": "exact_match"}], iterations=1)
    never = {"reward": LocalGroup(RewardWorker, WorkerContext("reward", 0, 1, config, source))}
    with pytest.raises(DivergedError, match="0 of 8 groups have spread after 4 draws of 8 prompts"):
        learn_toy(config, source, never)
