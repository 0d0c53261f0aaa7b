"""Where the roles run changes nothing: every placement and number of ranks learns the same; impossible ones say why."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file

from engine.errors import ConfigError
from engine.metrics import OF_THE_MACHINE
from engine.session import Session
from engine.store import StepRef
from tests.helpers.clusters import cluster_of, processes_of
from tests.helpers.runs import tiny_run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]
ITERATIONS = 3
# Any reward that random answers sometimes earn: without it nothing would be learned, and anything would equal anything.
PPO: dict[str, Any] = {
    "algorithm": {"name": "ppo"},
    "sft": None,
    "reward": [{"kind": "regex", "pattern": "[a-z]"}],
    "iterations": ITERATIONS,
}
MAP = {
    "mode": "map",
    "pools": {
        "generation": {"ranks": 2, "resources": {"CPU": 0.5}},
        "learning": {"ranks": 2, "resources": {"CPU": 0.5, "scratch": 1}},
        "scoring": {"resources": {"CPU": 0.25}},
    },
    "roles": {"rollout": "generation", "policy": "learning", "critic": "learning", "reward": "scoring"},
}
COUNTS_AT_A_THRESHOLD = {"policy/clip_frac", "value/clip_frac"}  # one token may fall on the other side
# Metrics of every iteration, and weights of each trained role after the last.
Learned = tuple[list[dict[str, float]], dict[str, dict[str, torch.Tensor]]]


def learn(session: Session, data: StepRef) -> Learned:
    """All iterations of a run; the session is closed."""
    store, metrics = session.run.store, []
    try:
        step = session.start(data)
        for iteration in range(1, ITERATIONS + 1):
            step = session.train(iteration, session.rollout(iteration, step))
            found = store.manifest(step).metrics
            metrics.append({name: value for name, value in found.items() if not name.startswith(OF_THE_MACHINE)})
    finally:
        session.close()
    return metrics, {role: load_weights(store.read(step) / role) for role in ("policy", "critic")}


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(found: Learned, expected: Learned) -> bool:
    """Whether two runs ended with the same bits everywhere."""
    weights = [(found[1][role][name], tensor) for role in expected[1] for name, tensor in expected[1][role].items()]
    return found[0] == expected[0] and all(torch.equal(one, other) for one, other in weights)


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    run, data = tiny_run(tmp_path_factory.mktemp("local"), "local", **PPO)
    metrics, weights = learn(Session(run), data)
    assert all(found["train/grad_norm"] > 0 and found["reward/score_std"] > 0 for found in metrics)
    return metrics, weights


def apart(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Length of the difference of all weights of a role, relative to the expected ones."""
    assert found.keys() == expected.keys()
    differences = torch.cat([(found[name] - tensor).flatten() for name, tensor in expected.items()])
    return float(differences.norm() / torch.cat([tensor.flatten() for tensor in expected.values()]).norm())


def nothing_left(address: str, run_key: str) -> bool:
    """Whether a cluster has all its resources back and no process of a run lives."""
    ray.init(address=address, log_to_driver=False)
    try:
        groups = ray.util.placement_group_table().values()
        return not processes_of(run_key) and all(group["state"] == "REMOVED" for group in groups)
    finally:
        ray.shutdown()


@pytest.mark.usefixtures("on_cluster")
@pytest.mark.parametrize(
    ("name", "placement"),
    [("colocate", {"mode": "colocate"}), ("standalone", {"mode": "standalone"})],
)
def test_one_rank_learns_exactly_what_one_process_learns(
    tmp_path: Path, in_one_process: Learned, name: str, placement: dict[str, Any]
):
    run, data = tiny_run(tmp_path, name, placement=placement, **PPO)
    assert same(learn(Session(run), data), in_one_process)


@pytest.mark.usefixtures("on_cluster")
@pytest.mark.parametrize(
    ("name", "placement"),
    [("map on two ranks", MAP), ("colocate on four ranks", {"mode": "colocate", "ranks": 4})],
)
def test_more_ranks_learn_the_same_up_to_the_order_of_sums(
    tmp_path: Path, in_one_process: Learned, ray_address: str, name: str, placement: dict[str, Any]
):
    """Gradients are added within each rank and then over ranks, so sums of float32 end differently in the last bits."""
    key = name.replace(" ", "-")
    run, data = tiny_run(tmp_path, key, placement=placement, **PPO)
    metrics, weights = learn(Session(run), data)
    for found, expected in zip(metrics, in_one_process[0], strict=True):
        assert found.keys() == expected.keys()
        for metric in found.keys() - COUNTS_AT_A_THRESHOLD:
            assert found[metric] == pytest.approx(expected[metric], rel=1e-5, abs=1e-6, nan_ok=True), metric
    for role, expected_weights in in_one_process[1].items():
        assert apart(weights[role], expected_weights) < 1e-5, role
    assert nothing_left(ray_address, key)


class TestImpossible:
    """An error at once, in words, and nothing left behind."""

    def refused(self, tmp_path: Path, address: str, placement: dict[str, Any], kind: type[Exception]) -> Any:
        started = time.perf_counter()
        run, data = tiny_run(tmp_path, "refused", placement={"timeout_s": 600.0, **placement}, **PPO)
        with pytest.raises(kind) as caught:
            Session(run).start(data)
        assert time.perf_counter() - started < 15.0
        assert nothing_left(address, "refused")
        return caught.value

    @pytest.mark.usefixtures("on_cluster")
    def test_a_pool_larger_than_the_cluster(self, tmp_path: Path, ray_address: str):
        error = self.refused(tmp_path, ray_address, {"mode": "colocate", "ranks": 64}, ConfigError)
        assert "Pool shared asked for 64 x {'CPU': 1.0}; the cluster has {'CPU': 16.0} in all" in str(error)

    @pytest.mark.usefixtures("on_cluster")
    def test_pools_that_fit_alone_but_not_together(self, tmp_path: Path, ray_address: str):
        error = self.refused(tmp_path, ray_address, {"mode": "standalone", "ranks": 6}, ConfigError)
        assert "asked for 19 CPU together" in str(error) and "{'CPU': 16.0}" in str(error)

    @pytest.mark.usefixtures("on_cluster")
    def test_a_resource_that_no_node_has(self, tmp_path: Path, ray_address: str):
        pools = {**MAP["pools"], "scoring": {"resources": {"TPU": 1}}}
        error = self.refused(tmp_path, ray_address, {**MAP, "pools": pools}, ConfigError)
        assert "Pool scoring asked for 1 x {'TPU': 1.0}; the cluster has {'TPU': 0.0}" in str(error)


def test_split_runs_on_a_cluster_of_two_nodes(tmp_path: Path, in_one_process: Learned):
    """Each node has one CPU, so that rollout and training cannot be on the same one."""
    with cluster_of({"CPU": 1}, {"CPU": 1}) as address:
        os.environ["RAY_ADDRESS"] = address
        try:
            run, data = tiny_run(tmp_path, "two-nodes", placement={"mode": "split"}, **PPO)
            session = Session(run)
            session.start(data)
            nodes = {
                node
                for group in ray.util.placement_group_table().values()
                for node in group["bundles_to_node_id"].values()
            }
            learned = learn(session, data)
        finally:
            del os.environ["RAY_ADDRESS"]
        assert len(nodes) == 2
        assert same(learned, in_one_process)
        assert nothing_left(address, "two-nodes")
