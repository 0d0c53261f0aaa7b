"""Rules between options: each refuses what cannot work, names the option, and lets the repaired configuration pass."""

import os
from typing import Any

import pytest

from engine.checks import check_config, check_sizes, plan_steps, processes, total_steps
from engine.controller.layout import ranks_of
from tests.helpers.configs import config

PPO = {"name": "ppo"}
MAP = {"mode": "map", "pools": {"main": {}}, "roles": dict.fromkeys(("rollout", "policy", "reward"), "main")}


def mapped(pools: dict[str, Any] | None = None, roles: dict[str, str] | None = None) -> dict[str, Any]:
    """Everything in the pool `main`, with these pools and roles added or replaced."""
    return {"placement": {**MAP, "pools": MAP["pools"] | (pools or {}), "roles": MAP["roles"] | (roles or {})}}


@pytest.fixture(autouse=True)
def two_cpus_two_gpus_and_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def found(**changed: Any) -> dict[str, Any]:
    problems = check_config(config(**changed))
    assert all(problem.remedy for problem in problems)
    return {problem.key: problem for problem in problems}


def test_the_defaults_fit_together():
    assert found() == {}
    assert found(algorithm=PPO) == {}


REFUSED = {
    "a dataflow that is not there": (
        {"algorithm": {"name": "custom", "dataflow": "no_such.dataflow"}},
        {"algorithm.dataflow"},
    ),
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
    "pools without mode map": (
        {"placement": {"pools": {"main": {}}, "roles": {"policy": "main"}}},
        {"placement.pools", "placement.roles"},
    ),
    "ranks beside a map": (
        {"placement": {**MAP, "ranks": 1, "rollout_ranks": 1}},
        {"placement.ranks", "placement.rollout_ranks"},
    ),
    "a map without pools": (
        {"placement": {"mode": "map"}},
        {"placement.pools", "placement.roles.rollout", "placement.roles.policy", "placement.roles.reward"},
    ),
    "a role without a pool": (
        {"placement": {**MAP, "roles": {"rollout": "main", "policy": "main"}}},
        {"placement.roles.reward"},
    ),
    "a role of another algorithm": (mapped(roles={"critic": "main"}), {"placement.roles.critic"}),
    "a role in no pool that exists": (mapped(roles={"reward": "mian"}), {"placement.roles.reward"}),
    "a pool that nobody uses": (mapped(pools={"spare": {"ranks": 1}}), {"placement.pools.spare"}),
    "a map of more CPUs than there are": (
        mapped(pools={"main": {"ranks": 5, "resources": {"CPU": 0.5}}}),
        {"placement.mode"},
    ),
    "a resource that a cluster of ones own has not": (
        mapped(pools={"main": {"resources": {"CPU": 1, "TPU": 1}}}),
        {"placement.pools.main.resources.TPU"},
    ),
    "a GPU and a half": (mapped(pools={"main": {"resources": {"GPU": 3}}}), {"placement.pools.main.resources.GPU"}),
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
    "warm-up longer than what critics leave to the policy": (
        {"train": {"warmup_steps": 2}, "algorithm": {**PPO, "critic_warmup": 2}},
        {"train.warmup_steps"},
    ),
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
    "a length that no response reaches": (
        {"reward": [{"kind": "exact_match"}, {"kind": "length_penalty", "max_tokens": 8, "buffer_tokens": 4}]},
        {"reward[1].max_tokens"},
    ),
    "a pattern that is none": ({"reward": [{"kind": "regex", "pattern": "("}]}, {"reward[0].pattern"}),
    "a root that two machines might both write": ({"root": "memory://bucket/runs"}, {"root"}),
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
    "a map onto fractions": mapped(pools={"main": {"ranks": 4, "resources": {"CPU": 0.5, "GPU": 0.5}}}),
    "deepspeed with a stage": {"train": {"zero_stage": 3}},
    "a target for a penalty": {"algorithm": {**PPO, "kl_coef": 0.1, "kl_target": 1.0, "kl_horizon": 5}},
    "warm-up of all but one step": {"train": {"warmup_steps": 5}},
    "warm-up of all but one of the policy's own steps": {
        "train": {"warmup_steps": 1},
        "algorithm": {**PPO, "critic_warmup": 2},
    },
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


class TestTensorParallel:
    @pytest.fixture(autouse=True)
    def large_cluster(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_ADDRESS", "head:6379")

    SEPARATE = mapped(pools={"engines": {"ranks": 4}}, roles={"rollout": "engines"})

    @pytest.mark.parametrize(
        ("changed", "keys"),
        [
            ({"placement": {"mode": "split", "rollout_ranks": 3}}, {"placement.rollout_ranks"}),
            ({"placement": {"mode": "standalone"}}, {"placement.rollout_ranks"}),
            ({"placement": {"rollout_ranks": 2}}, {"rollout.tensor_parallel"}),
            (mapped(pools={"main": {"ranks": 2}}), {"rollout.tensor_parallel"}),
            (mapped(pools={"engines": {"ranks": 5}}, roles={"rollout": "engines"}), {"placement.pools.engines.ranks"}),
        ],
    )
    def test_devices_that_make_no_whole_engines_are_refused(self, changed: dict[str, Any], keys: set[str]):
        assert found(rollout={"tensor_parallel": 2}, **changed).keys() == keys

    @pytest.mark.parametrize("changed", [{"placement": {"mode": "split", "rollout_ranks": 4}}, SEPARATE])
    def test_engines_are_placed_with_all_their_devices(self, changed: dict[str, Any]):
        options = config(rollout={"tensor_parallel": 2}, **changed)
        assert check_config(options) == []
        assert ranks_of(options, "rollout") == 2
        assert 4 in processes(options).values()


class TestDevicesOfThisMachine:
    @pytest.fixture(autouse=True)
    def one_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")

    def test_more_gpus_than_there_are_tell_asked_and_available(self):
        problem = found(**mapped(pools={"main": {"ranks": 2, "resources": {"GPU": 1}}}))
        assert problem.keys() == {"placement.pools.main.resources.GPU"}
        remedy = problem["placement.pools.main.resources.GPU"].remedy
        assert "ask for 2 GPUs in all" in remedy and "this machine has 1" in remedy

    def test_pools_are_added_up_and_each_is_named(self):
        pools = {
            "main": {"resources": {"GPU": 0.75}},
            "b": {"resources": {"GPU": 0.5}},
            "c": {"resources": {"CPU": 0.5}},
        }
        problems = found(**mapped(pools=pools, roles={"policy": "b", "reward": "c"}))
        assert problems.keys() == {"placement.pools.main.resources.GPU", "placement.pools.b.resources.GPU"}

    def test_what_is_there_may_be_shared_out(self):
        assert found(**mapped(pools={"main": {"ranks": 2, "resources": {"CPU": 1, "GPU": 0.5}}})) == {}

    @pytest.mark.parametrize("visible", ["", "-1"])
    def test_hidden_gpus_are_none(self, monkeypatch: pytest.MonkeyPatch, visible: str):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert "this machine has 0" in str(found(**mapped(pools={"main": {"resources": {"GPU": 0.1}}})))

    def test_more_memory_than_there_is(self):
        problems = found(**mapped(pools={"main": {"resources": {"CPU": 1, "memory": 10**16}}}))
        assert problems.keys() == {"placement.pools.main.resources.memory"}
        assert "1e+16 bytes" in problems["placement.pools.main.resources.memory"].remedy

    def test_a_larger_cluster_may_have_them(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("RAY_ADDRESS", "head:6379")
        assert found(**mapped(pools={"main": {"resources": {"GPU": 8, "memory": 10**16}}})) == {}


def test_everything_wrong_with_a_map_is_told_at_once():
    wrong = {
        **MAP,
        "ranks": 2,
        "pools": {"main": {}, "spare": {}},
        "roles": {"policy": "main", "judge": "main", "reward": "x"},
    }
    problems = found(placement=wrong)
    assert problems.keys() == {
        "placement.ranks",
        "placement.pools.spare",
        "placement.roles.rollout",
        "placement.roles.judge",
        "placement.roles.reward",
    }
    assert "main, spare" in problems["placement.roles.reward"].remedy


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
    placement = {"mode": mode, "ranks": 2, "rollout_ranks": 3}
    options = config(algorithm={**PPO, "kl_coef": 0.1}, placement=placement)
    assert processes(options) == expected


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


def test_the_gate_may_look_at_any_reward_of_the_run():
    rewards = [{"kind": "exact_match"}, {"kind": "regex", "pattern": "a"}, {"kind": "regex", "pattern": "b"}]
    assert check_config(config(reward=rewards, gate={"component": "regex_2"})) == []
    (problem,) = check_config(config(reward=rewards, gate={"component": "regex_3"}))
    assert problem.key == "gate.component" and "exact_match, regex, regex_2" in problem.remedy
