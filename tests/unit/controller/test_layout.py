"""Layouts: which roles share processes and pools in every mode."""

from typing import Any

import pytest

from engine.controller.layout import layout, ranks_of, roles_of, transport
from tests.helpers.configs import config

PPO = {"name": "ppo", "kl_coef": 0.1}
ALL = ("rollout", "policy", "reward", "reference", "critic")


def sets(**placement: Any) -> list[tuple[str, str, int]]:
    """Roles, pool and ranks of every process set."""
    return [(own.name, own.pool, own.ranks) for own in layout(config(algorithm=PPO, placement=placement)).sets]


def test_roles_are_those_that_the_algorithm_needs():
    assert roles_of(config(algorithm=PPO)) == ALL
    assert roles_of(config()) == ("rollout", "policy", "reward")
    assert roles_of(config(algorithm={"name": "grpo", "kl_loss_coef": 0.1}))[-1] == "reference"


def test_colocate_has_two_kinds_of_process_in_one_pool():
    assert sets(mode="colocate", ranks=2, rollout_ranks=3) == [
        ("rollout", "shared", 3),
        ("policy+reward+reference+critic", "shared", 2),
    ]
    plan = layout(config(placement={"ranks": 2, "rollout_ranks": 3}))
    assert plan.pools["shared"].ranks == 3 and plan.sharing("shared") == 2


def test_split_and_standalone_have_pools_of_their_own():
    assert sets(mode="split", ranks=2) == [("rollout", "rollout", 1), ("policy+reward+reference+critic", "train", 2)]
    assert sets(mode="standalone", ranks=2)[0] == ("rollout", "rollout", 1)
    assert sets(mode="standalone", ranks=2)[1:] == [(role, role, 2) for role in ALL[1:]]
    assert sets(mode="local") == []


def test_a_map_shares_processes_within_a_pool_but_for_the_engine():
    pools = {"big": {"ranks": 4, "resources": {"CPU": 0.5, "fast": 1}}, "small": {}}
    roles = {"rollout": "big", "policy": "big", "critic": "big", "reward": "small", "reference": "small"}
    options = config(algorithm=PPO, placement={"mode": "map", "pools": pools, "roles": roles})
    plan = layout(options)
    assert [(own.name, own.pool, own.ranks) for own in plan.sets] == [
        ("rollout", "big", 4),
        ("policy+critic", "big", 4),
        ("reward+reference", "small", 1),
    ]
    assert plan.pools["big"].resources == {"CPU": 0.5, "fast": 1.0} and plan.pools["small"].resources is None
    assert (plan.sharing("big"), plan.sharing("small")) == (2, 1)
    assert (ranks_of(options, "critic"), ranks_of(options, "reward")) == (4, 1)


@pytest.mark.parametrize("mode", ["split", "standalone"])
def test_an_engine_of_several_devices_is_one_process_that_holds_them_all(mode: str):
    plan = layout(config(rollout={"tensor_parallel": 2}, placement={"mode": mode, "rollout_ranks": 6}))
    assert plan.sets[0].ranks == 3
    assert (plan.pools["rollout"].ranks, plan.pools["rollout"].devices) == (3, 2)


APART = {"mode": "map", "pools": {"a": {}, "b": {}}, "roles": {"rollout": "a", "reward": "a", "policy": "b"}}


@pytest.mark.parametrize(
    ("placement", "wanted"),
    [
        ({"mode": "colocate", "ranks": 2, "rollout_ranks": 2}, "ipc"),
        ({"mode": "colocate", "ranks": 2}, "ipc"),
        ({"mode": "colocate", "ranks": 1, "rollout_ranks": 2}, "file"),
        ({"mode": "split"}, "broadcast"),
        ({"mode": "standalone"}, "broadcast"),
        (APART, "broadcast"),
        ({"mode": "local"}, "file"),
    ],
)
def test_weights_stay_on_gpus_where_every_engine_can_reach_a_trainer(placement: dict[str, Any], wanted: str):
    """An engine beside the scorer alone gets them from afar; one without a trainer on its GPU, from a file."""
    assert transport(config(placement=placement), "cuda", "cuda") == wanted


def test_weights_go_through_a_file_where_either_side_has_no_gpu_or_the_engine_knows_no_transfer():
    assert transport(config(), "cpu", "cuda") == transport(config(), "cuda", "cpu") == "file"
    assert transport(config(), "cpu", "cpu") == "file"
    assert transport(config(rollout={"backend": "hf"}), "cuda", "cuda") == "file"
