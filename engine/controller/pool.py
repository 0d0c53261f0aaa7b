"""Pools: resources of the Ray cluster reserved for a run, and the check that the cluster could ever give them."""

import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

os.environ.setdefault("RAY_RAYLET_PID", str(os.getpid()))  # see cluster.py

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.controller.layout import PoolPlan
from engine.errors import ConfigError, HybridFlowError, TransientError

_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}  # Ray's names for resources that are not custom


class Pool:
    """Resources reserved for `plan.ranks` processes, shared evenly by the `sharing` process sets placed in it."""

    def __init__(self, name: str, plan: PoolPlan, sharing: int, timeout_s: float) -> None:
        self.name = name
        self._share = {key: amount / sharing for key, amount in bundle_of(plan).items()}
        self._group: PlacementGroup = placement_group([bundle_of(plan) for _ in range(plan.ranks)], strategy="PACK")
        if not self._group.wait(timeout_s):
            remove_placement_group(self._group)
            raise TransientError(
                f"Pool {name} asked for {_asked(plan)}; the cluster has {_shown(ray.available_resources(), plan)} "
                f"free of {_shown(ray.cluster_resources(), plan)}.",
                remedy=f"Waited {timeout_s:g} s. Lower the ranks, free the cluster or raise placement.timeout_s.",
            )

    def options(self, rank: int, environment: Mapping[str, str]) -> dict[str, Any]:
        """Ray actor options of one host in this pool, with these environment variables."""
        own = {_OPTIONS[key]: amount for key, amount in self._share.items() if key in _OPTIONS}
        return {
            "num_cpus": 0,  # where the pool names none; Ray's own default would be one
            **own,
            "resources": {key: amount for key, amount in self._share.items() if key not in _OPTIONS},
            "max_restarts": 0,
            "name": f"{self.name}-{rank}-{uuid.uuid4().hex[:8]}",
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank),
            "runtime_env": {"env_vars": dict(environment)},
        }

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        remove_placement_group(self._group)


def bundle_of(plan: PoolPlan) -> dict[str, float]:
    """Resources of one process in a pool, on this cluster."""
    unit = plan.resources
    if unit is None:
        unit = {"CPU": 1.0, "GPU": 1.0} if ray.cluster_resources().get("GPU", 0.0) >= 1 else {"CPU": 1.0}
    return {key: amount * plan.devices for key, amount in unit.items()}


def require_capacity(pools: Mapping[str, PoolPlan], *, met_before: bool) -> None:
    """Whether the whole cluster, were it idle, could hold all pools; if not, an error with both sides at once.

    met_before: these pools were placed in this cluster once, so a node has left that may come back: TransientError.
    Otherwise trying again would not help: ConfigError.
    """
    kind = TransientError if met_before else ConfigError
    nodes: list[dict[str, float]] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for name, plan in pools.items():
        bundle = bundle_of(plan)
        if sum(_fitting(node, bundle) for node in nodes) < plan.ranks:
            raise _never(kind, f"Pool {name} asked for {_asked(plan)}", [plan])
    total = ray.cluster_resources()
    plans = list(pools.values())
    for key in sorted({key for plan in plans for key in bundle_of(plan)}):
        asked = sum(plan.ranks * bundle_of(plan).get(key, 0.0) for plan in plans)
        if asked > total.get(key, 0.0) + 1e-9:
            each = ", ".join(f"{name} {_asked(plan)}" for name, plan in pools.items())
            raise _never(kind, f"The pools asked for {asked:g} {key} together ({each})", plans)


def _never(kind: type[HybridFlowError], asked: str, plans: Sequence[PoolPlan]) -> HybridFlowError:
    keys = {key: 0.0 for plan in plans for key in bundle_of(plan)}
    nodes = [_only(node["Resources"], keys) for node in ray.nodes() if node["Alive"]]
    return kind(
        f"{asked}; the cluster has {_only(ray.cluster_resources(), keys)} in all, on {len(nodes)} nodes {nodes}.",
        remedy="It would wait for ever. Lower the ranks or resources of the placement, or use a larger cluster.",
    )


def _fitting(node: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """How many bundles an idle node holds."""
    return min(int((node.get(key, 0.0) + 1e-9) // amount) for key, amount in bundle.items())


def _asked(plan: PoolPlan) -> str:
    return f"{plan.ranks} x {bundle_of(plan)}"


def _shown(resources: Mapping[str, float], plan: PoolPlan) -> dict[str, float]:
    return _only(resources, bundle_of(plan))


def _only(resources: Mapping[str, float], keys: Mapping[str, float]) -> dict[str, float]:
    return {key: resources.get(key, 0.0) for key in keys}
