"""Whether a run fits: pools of every placement, and each refusal with key, value and remedy."""

from typing import Any

import pytest

from engine.architecture import read_architecture
from engine.capacity import CONTEXT, Capacity, Machine, capacity, pools_of
from engine.sizing import GIB
from tests.contracts.sources import ROOT
from tests.helpers.configs import config

PPO = {"name": "ppo", "kl_coef": 0.1}
ROOMY = Machine(gpu_bytes=10_000 * GIB, disk_bytes=10**15, shared_bytes=10**15)


def of_7b(machine: Machine = ROOMY, **changed: Any) -> Capacity:
    shapes = read_architecture(ROOT / "deployments" / "presets" / "models" / "llama-2-7b")
    assert shapes is not None
    return capacity(config(model={"source": "m", "dtype": "bfloat16"}, **changed), shapes, machine)


def found(machine: Machine = ROOMY, **changed: Any) -> dict[str, Any]:
    problems = of_7b(machine, **changed).problems
    assert all(problem.remedy for problem in problems)
    return {problem.key: problem for problem in problems}


def test_a_large_machine_has_room():
    assert found() == {}


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ({"mode": "local"}, {"local": 1}),
        ({"mode": "colocate", "ranks": 2, "rollout_ranks": 4}, {"shared": 4}),
        ({"mode": "split", "ranks": 2, "rollout_ranks": 4}, {"rollout": 4, "train": 2}),
        ({"mode": "standalone", "ranks": 2}, {"rollout": 1, "policy": 2, "critic": 2, "reference": 2}),
    ],
)
def test_devices_of_every_pool(placement: dict[str, Any], expected: dict[str, int]):
    pools = of_7b(algorithm=PPO, placement=placement).report["pools"]
    assert {name: pool["devices"] for name, pool in pools.items()} == expected
    roles = sorted(role for pool in pools.values() for role in pool["roles"])
    assert roles == ["critic", "policy", "reference", "rollout"]


def test_an_engine_over_several_devices_takes_them_all():
    pools = of_7b(rollout={"tensor_parallel": 4}, placement={"mode": "split", "rollout_ranks": 2}).report["pools"]
    assert pools["rollout"]["devices"] == 8


def test_roles_of_a_process_work_in_turn_and_processes_add_up():
    sizes = of_7b(algorithm=PPO, placement={"mode": "colocate"}).report
    roles = sizes["roles"]
    work = {name: memory["activations"] for name, memory in roles.items()}
    held = sum(memory["total"] - memory["activations"] for memory in roles.values())
    trainers = max(work["policy"], work["critic"], work["reference"])
    assert sizes["pools"]["shared"]["bytes"] == held + work["rollout"] + trainers + 2 * CONTEXT
    separate = of_7b(algorithm=PPO, placement={"mode": "standalone"}).report["pools"]
    assert separate["critic"]["bytes"] == roles["critic"]["total"] + CONTEXT


def test_a_full_device_is_refused_and_says_with_what():
    problem = found(Machine(gpu_bytes=80 * GIB))["placement.device_memory_gib"]
    assert problem.value == 80.0
    assert "policy 113.0 GiB" in problem.remedy and "train.zero_stage" in problem.remedy


def test_without_gpus_all_processes_share_the_memory_of_the_machine():
    needed = of_7b(Machine(), placement={"ranks": 2}).report["pools"]["shared"]["bytes"]
    one = of_7b(Machine()).report["pools"]["shared"]["bytes"]
    roles = of_7b(Machine()).report["roles"]
    assert needed - one >= roles["policy"]["weights"] + roles["policy"]["optimiser"]
    assert found(Machine(ram_bytes=needed), placement={"ranks": 2}) == {}
    assert found(Machine(ram_bytes=needed - 1), placement={"ranks": 2}).keys() == {"model.source"}


@pytest.mark.parametrize("parallel", [1, 2, 4, 8, 16, 32])
def test_heads_that_divide(parallel: int):
    assert found(rollout={"tensor_parallel": parallel}) == {}


@pytest.mark.parametrize("parallel", [3, 5, 64])
def test_heads_that_do_not_divide(parallel: int):
    problem = found(rollout={"tensor_parallel": parallel})["rollout.tensor_parallel"]
    assert (
        problem.value == parallel and "32 attention heads" in problem.remedy and "1, 2, 4, 8, 16, 32" in problem.remedy
    )


def test_key_heads_may_be_fewer_than_devices_but_must_divide():
    shapes = read_architecture(ROOT / "deployments" / "presets" / "models" / "qwen2.5-1.5b")  # 12 heads, 2 for keys
    assert shapes is not None
    refused = {
        parallel: [
            problem.key for problem in capacity(config(rollout={"tensor_parallel": parallel}), shapes, ROOMY).problems
        ]
        for parallel in (1, 2, 3, 4)
    }
    assert refused == {1: [], 2: [], 3: ["rollout.tensor_parallel"], 4: []}


def test_a_cache_without_room_for_one_sample_is_refused():
    tight = found(Machine(gpu_bytes=2000 * GIB), rollout={"gpu_memory_utilization": 0.007})
    assert (
        "cache of 0 tokens"
        in found(rollout={"gpu_memory_utilization": 0.0001})["rollout.gpu_memory_utilization"].remedy
    )
    assert "rollout.gpu_memory_utilization" not in tight
    long = {"data": {"max_prompt_tokens": 3000}, "rollout": {"kv_cache_gib": 1}}
    assert "3004" in found(Machine(), **long)["rollout.kv_cache_gib"].remedy


def test_a_disk_that_is_too_small_names_the_root():
    needed = of_7b().report["disk"]["total"]
    assert found(Machine(gpu_bytes=10**15, disk_bytes=needed)) == {}
    assert found(Machine(gpu_bytes=10**15, disk_bytes=needed - 1)).keys() == {"root"}


def test_disk_holds_what_is_kept_and_one_more():
    few = of_7b(iterations=2).report["disk"]
    assert few["checkpoints"] == 2  # two iterations write no third
    options = {"iterations": 40, "checkpoint": {"every": 10, "keep_last": 1, "keep_best": 2}}
    assert of_7b(**options).report["disk"]["checkpoints"] == 1 + 1
    assert of_7b(**options, evaluation={"every": 10}).report["disk"]["checkpoints"] == 1 + 2 + 1
    assert few["experience"] * 20 == of_7b(**options).report["disk"]["experience"]


def test_shared_memory_must_hold_the_weights():
    assert found(Machine(gpu_bytes=10**15, shared_bytes=2 * 6_738_415_616 - 1)).keys() == {"shared memory"}


def test_uneven_ranks_and_unknown_devices_are_noted():
    uneven = of_7b(placement={"ranks": 3}).report
    assert uneven["samples_per_rank_and_step"] == [5, 6] and "3 ranks" in uneven["notes"][0]
    assert "not known" in of_7b(Machine()).report["notes"][0]


def test_what_is_written_for_people_has_every_role_and_pool():
    text = "\n".join(of_7b(algorithm=PPO, placement={"mode": "split"}).lines)
    for word in ("6,738,415,616", "policy", "critic", "reference", "rollout", "pool train", "pool rollout", "disk"):
        assert word in text


def test_pools_name_processes_that_are_alike():
    (engine, trainers) = pools_of(config(placement={"mode": "colocate", "ranks": 2}))["shared"]
    assert (engine.roles, engine.ranks, trainers.roles, trainers.ranks) == (("rollout",), 1, ("policy",), 2)
