"""Rules between options: each refuses what cannot work, names the option, and lets the repaired configuration pass."""

import os
from typing import Any

import pytest

from engine.checks import check_config, check_sizes, plan_steps, processes, total_steps
from tests.helpers.configs import config

PPO = {"name": "ppo"}


@pytest.fixture(autouse=True)
def two_cpus_and_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def found(**changed: Any) -> dict[str, Any]:
    problems = check_config(config(**changed))
    assert all(problem.remedy for problem in problems)
    return {problem.key: problem for problem in problems}


def test_the_defaults_fit_together():
    assert found() == {}
    assert found(algorithm=PPO) == {}


REFUSED = {
    "one sample for a group": ({"rollout": {"samples_per_prompt": 1}}, {"rollout.samples_per_prompt"}),
    "mini-batches that do not divide": ({"train": {"mini_batches": 5}}, {"train.mini_batches"}),
    "mini-batches smaller than the ranks": (
        {"train": {"mini_batches": 32}, "placement": {"ranks": 2}},
        {"train.mini_batches"},
    ),
    "top-p without correction": ({"rollout": {"top_p": 0.9}}, {"rollout.top_p"}),
    "top-k without correction": ({"rollout": {"top_k": 20}}, {"rollout.top_k"}),
    "a floor without correction": (
        {"algorithm": {"name": "grpo", "correction": {"floor": 0.5}}},
        {"algorithm.correction.floor"},
    ),
    "a cap without correction": (
        {"algorithm": {"name": "grpo", "correction": {"cap": 3.0}}},
        {"algorithm.correction.cap"},
    ),
    "a floor above the cap": (
        {"algorithm": {"name": "grpo", "correction": {"mode": "icepop", "floor": 5.0}}},
        {"algorithm.correction.floor"},
    ),
    "more ranks than CPUs": ({"placement": {"ranks": 3}}, {"placement.mode"}),
    "more rollout ranks than CPUs": ({"placement": {"rollout_ranks": 3}}, {"placement.mode"}),
    "split over more than there is": ({"placement": {"mode": "split", "ranks": 2}}, {"placement.mode"}),
    "standalone roles on two CPUs": ({"placement": {"mode": "standalone"}}, {"placement.mode"}),
    "local with ranks": ({"placement": {"mode": "local", "ranks": 2}}, {"placement.ranks"}),
    "local with rollout ranks": ({"placement": {"mode": "local", "rollout_ranks": 2}}, {"placement.rollout_ranks"}),
    "zero stage without deepspeed": ({"train": {"backend": "torch", "zero_stage": 1}}, {"train.zero_stage"}),
    "vllm options for hf": (
        {
            "rollout": {
                "backend": "hf",
                "kv_cache_gib": 1,
                "gpu_memory_utilization": 0.5,
                "max_batched_tokens": 99,
                "tensor_parallel": 1,
            }
        },
        {
            f"rollout.{name}"
            for name in ("kv_cache_gib", "gpu_memory_utilization", "max_batched_tokens", "tensor_parallel")
        },
    ),
    "an engine step shorter than a sample": ({"rollout": {"max_batched_tokens": 19}}, {"rollout.max_batched_tokens"}),
    "a gate on no suite": ({"gate": {"suite": "math"}}, {"gate.suite"}),
    "two suites of one name": (
        {"evaluation": {"suites": [{"name": "held_out"}, {"name": "held_out"}]}},
        {"evaluation.suites[1].name"},
    ),
    "a horizon without target": ({"algorithm": {**PPO, "kl_coef": 0.1, "kl_horizon": 5}}, {"algorithm.kl_horizon"}),
    "a target for no penalty": ({"algorithm": {**PPO, "kl_target": 1.0}}, {"algorithm.kl_target"}),
    "a kind of no KL loss": ({"algorithm": {"name": "grpo", "kl_loss_kind": "k1"}}, {"algorithm.kl_loss_kind"}),
    "a critic that never stops warming up": ({"algorithm": {**PPO, "critic_warmup": 3}}, {"algorithm.critic_warmup"}),
    "warm-up longer than the run": ({"train": {"warmup_steps": 6}}, {"train.warmup_steps"}),
    "sft warm-up longer than sft": ({"sft": {"steps": 5, "warmup_steps": 5}}, {"sft.warmup_steps"}),
    "sft batches smaller than the ranks": (
        {"sft": {"steps": 5, "batch_size": 1}, "placement": {"ranks": 2}},
        {"sft.batch_size"},
    ),
    "averages that never move": ({"train": {"betas": [0.9, 1.0]}}, {"train.betas"}),
    "the best of nothing scored": ({"checkpoint": {"keep_best": 2}}, {"checkpoint.keep_best"}),
    "a share beside evaluation data": ({"data": {"eval": [{"path": "x"}]}}, {"data.eval_fraction"}),
    "a bad share that is never allowed": ({"data": {"max_bad_share": 0.5}}, {"data.max_bad_share"}),
    "an empty stop text": ({"rollout": {"stop": ["a", ""]}}, {"rollout.stop"}),
    "rewards that weigh nothing": ({"reward": [{"kind": "exact_match", "weight": 0.0}]}, {"reward[0].weight"}),
    "a pattern that is none": ({"reward": [{"kind": "regex", "pattern": "("}]}, {"reward[0].pattern"}),
    "a root that is no folder": ({"root": "s3://bucket/runs"}, {"root"}),
    "a password in an address": (
        {"registry": {"model": "m", "tracking_uri": "https://me:hunter2@host"}},
        {"registry.tracking_uri"},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str):
    changed, keys = REFUSED[name]
    assert found(**changed).keys() == keys


ALLOWED = {
    "one sample for ppo": {"algorithm": PPO, "rollout": {"samples_per_prompt": 1}},
    "top-p with correction": {
        "algorithm": {"name": "grpo", "correction": {"mode": "token", "cap": 3.0, "floor": 0.1}},
        "rollout": {"top_p": 0.9, "top_k": 10},
    },
    "two ranks on two CPUs": {"placement": {"ranks": 2, "rollout_ranks": 2}},
    "split on two CPUs": {"placement": {"mode": "split"}},
    "local": {"placement": {"mode": "local"}},
    "deepspeed with a stage": {"train": {"zero_stage": 3}},
    "a target for a penalty": {"algorithm": {**PPO, "kl_coef": 0.1, "kl_target": 1.0, "kl_horizon": 5}},
    "warm-up of all but one step": {"train": {"warmup_steps": 5}, "algorithm": {**PPO, "critic_warmup": 2}},
    "the best of what is scored": {"checkpoint": {"keep_best": 2}, "evaluation": {"every": 1}},
    "keeping no best at all": {"checkpoint": {"keep_best": 0}},
    "bad lines with a share": {"data": {"bad_lines": "skip", "max_bad_share": 0.5}},
    "an engine step of one sample": {"rollout": {"max_batched_tokens": 20}},
    "a user's name in an address": {"registry": {"model": "m", "tracking_uri": "https://me@host"}},
}


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(name: str):
    assert found(**ALLOWED[name]) == {}


def test_a_larger_cluster_may_hold_what_this_machine_cannot(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert found(placement={"mode": "standalone", "ranks": 8}) == {}


def test_an_impossible_placement_tells_asked_and_available():
    remedy = found(placement={"mode": "standalone", "ranks": 3}, algorithm=PPO)["placement.mode"].remedy
    assert "10 processes" in remedy and "2 CPUs" in remedy


def test_a_password_is_not_shown():
    problem = found(registry={"model": "m", "tracking_uri": "https://me:hunter2@host"})["registry.tracking_uri"]
    assert "hunter2" not in str(problem) and "me:***@host" in str(problem)


@pytest.mark.parametrize(
    ("unknown", "left"),
    [
        ("train.mini_batches", {"gate.suite"}),
        ("train", {"gate.suite"}),
        ("gate", {"train.mini_batches"}),
        ("evaluation.suites[0].name", {"train.mini_batches"}),
        ("name", {"train.mini_batches", "gate.suite"}),
    ],
)
def test_rules_that_read_an_unknown_option_are_left_out(unknown: str, left: set[str]):
    problems = check_config(config(train={"mini_batches": 5}, gate={"suite": "x"}), {unknown})
    assert {problem.key for problem in problems} == left


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("local", {}),
        ("colocate", {"shared": 3}),
        ("split", {"rollout": 3, "train": 2}),
        ("standalone", {"rollout": 3, "policy": 2, "reward": 2, "reference": 2, "critic": 2}),
    ],
)
def test_processes_agree_with_the_placement(mode: str, expected: dict[str, int]):
    from engine.placement import process_sets

    placement = {"mode": mode, "ranks": 2, "rollout_ranks": 3}
    options = config(algorithm={**PPO, "kl_coef": 0.1}, placement=placement)
    assert processes(options) == expected
    if mode in ("split", "standalone"):
        assert processes(options).keys() == process_sets(options).keys()


class TestSizes:
    def test_more_prompts_than_rows_tells_both_numbers(self):
        (problem,) = check_sizes(config(), train_rows=3, eval_rows=1)
        assert problem.key == "train.prompts_per_iteration" and problem.value == 8 and "3 rows" in problem.remedy

    def test_exactly_enough_rows_are_enough(self):
        assert check_sizes(config(), train_rows=8, eval_rows=1) == []

    def test_nothing_to_evaluate_on(self):
        assert [problem.key for problem in check_sizes(config(), 8, 0)] == ["data.eval"]

    def test_suites_with_data_of_their_own_need_no_evaluation_rows(self):
        options = config(evaluation={"suites": [{"name": "held_out", "data": [{"path": "x"}]}]})
        assert check_sizes(options, 8, 0) == []


def test_the_plan_adds_up():
    options = config(train={"epochs": 2, "mini_batches": 4}, evaluation={"every": 2}, sft={"steps": 7})
    assert total_steps(options) == 3 * 2 * 4
    assert plan_steps(options) == {
        "iterations": 3,
        "sft_steps": 7,
        "optimiser_steps": 24,
        "samples_per_iteration": 32,
        "samples": 96,
        "response_tokens_at_most": 384,
        "tokens_at_most": 1920,
        "evaluations": 3,  # start, 2 and the last
        "processes": 1,
    }
