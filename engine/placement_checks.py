"""Rules about placement: what cannot be placed at all, and what an explicit map leaves open."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from engine.config import PlacementConfig, RunConfig
from engine.controller.layout import layout, roles_of
from engine.errors import Problem

LAYOUT = (
    "placement.mode",
    "placement.ranks",
    "placement.rollout_ranks",
    "placement.pools",
    "placement.roles",
    "rollout.tensor_parallel",
)
_EMBEDDED = ("CPU", "GPU", "memory")  # what a cluster that the run starts itself may have


def _cpus(config: RunConfig) -> Iterator[Problem]:
    plan, available = layout(config), os.cpu_count() or 1
    asked = {
        name: pool.ranks * pool.devices * (pool.resources or {"CPU": 1.0}).get("CPU", 0.0)
        for name, pool in plan.pools.items()
    }
    if "RAY_ADDRESS" in os.environ or sum(asked.values()) <= available:
        return
    pools = ", ".join(f"{name} {count:g}" for name, count in asked.items())
    what = "CPUs" if config.placement.mode == "map" else "processes"
    remedy = (
        f"asks for {sum(asked.values()):g} {what} ({pools}), this machine has {available} CPUs; "
        "lower the ranks of the placement, use mode colocate, or set RAY_ADDRESS to a larger cluster"
    )
    yield Problem("placement.mode", config.placement.mode, remedy)


def _devices(config: RunConfig) -> Iterator[Problem]:
    """GPUs and memory that the pools of a map ask for together, against what a cluster on this machine would have."""
    if "RAY_ADDRESS" in os.environ or config.placement.mode != "map":
        return
    plan = layout(config)
    for resource, available, unit in (("GPU", float(_gpus()), "GPUs"), ("memory", float(_memory()), "bytes")):
        asked = {
            name: pool.ranks * pool.devices * (pool.resources or {}).get(resource, 0.0)
            for name, pool in plan.pools.items()
        }
        if (total := sum(asked.values())) <= available:
            continue
        for name, amount in asked.items():
            if amount:
                remedy = (
                    f"the pools ask for {total:g} {unit} in all, {amount:g} of them here, and this machine has "
                    f"{available:g}; lower it, or set RAY_ADDRESS to a larger cluster"
                )
                given = (plan.pools[name].resources or {})[resource]
                yield Problem(f"placement.pools.{name}.resources.{resource}", given, remedy)


def _gpus() -> int:
    """GPUs that a cluster started here could use; without torch, which takes seconds to load."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([name for name in visible.split(",") if name.strip() and name.strip() != "-1"])
    return len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _local(config: RunConfig) -> Iterator[Problem]:
    if config.placement.mode == "local":
        for name, value in (("ranks", config.placement.ranks), ("rollout_ranks", config.placement.rollout_ranks)):
            if value != 1:
                yield Problem(f"placement.{name}", value, "mode local is one process; use 1, or another mode")


def _unused(config: RunConfig) -> Iterator[Problem]:
    placement = config.placement
    if placement.mode == "map":
        for name in sorted({"ranks", "rollout_ranks"} & placement.model_fields_set):
            remedy = "has no use in mode map, where every pool has its ranks; leave it out"
            yield Problem(f"placement.{name}", placement.model_dump()[name], remedy)
        return
    for name in sorted({"pools", "roles"} & placement.model_fields_set):
        remedy = f"is used by mode map only, not by {placement.mode}; set placement.mode: map, or leave it out"
        yield Problem(f"placement.{name}", sorted(placement.model_dump()[name]), remedy)


def _map(config: RunConfig) -> Iterator[Problem]:
    placement, roles = config.placement, roles_of(config)
    if placement.mode != "map":
        return
    if not placement.pools:
        yield Problem("placement.pools", {}, "mode map needs pools, such as {main: {ranks: 1}}")
    for role in roles:
        if role not in placement.roles:
            remedy = f"this run has the role {role}, which has no pool; give it one of {_names(placement)}"
            yield Problem(f"placement.roles.{role}", None, remedy)
    for role, target in placement.roles.items():
        if role not in roles:
            yield Problem(f"placement.roles.{role}", target, f"is no role of this run, which has {', '.join(roles)}")
        elif target not in placement.pools:
            yield Problem(f"placement.roles.{role}", target, f"is no pool; use one of {_names(placement)}")
    for name, pool in placement.pools.items():
        if name not in placement.roles.values():
            yield Problem(f"placement.pools.{name}", pool.ranks, "no role is placed in this pool; use it, or remove it")


def _tensor_parallel(config: RunConfig) -> Iterator[Problem]:
    placement, size = config.placement, config.rollout.tensor_parallel
    if size == 1 or placement.mode == "local":
        return
    name, key, ranks = None, "placement.rollout_ranks", placement.rollout_ranks
    if placement.mode == "map":
        name = placement.roles.get("rollout")
        if name not in placement.pools:
            return
        key, ranks = f"placement.pools.{name}.ranks", placement.pools[name].ranks
    if ranks % size:
        remedy = f"rollout.tensor_parallel = {size} does not divide it; use {size} or a multiple of it"
        yield Problem(key, ranks, remedy)
    if placement.mode == "colocate" or (name and list(placement.roles.values()).count(name) > 1):
        remedy = "an engine of several devices needs a pool of its own; use placement.mode: split"
        yield Problem("rollout.tensor_parallel", size, remedy)


def _custom_resources(config: RunConfig) -> Iterator[Problem]:
    if "RAY_ADDRESS" in os.environ:
        return
    for name, pool in config.placement.pools.items():
        for resource, amount in (pool.resources or {}).items():
            if resource not in _EMBEDDED:
                has = ", ".join(_EMBEDDED)
                remedy = f"a cluster started by the run has only {has}; set RAY_ADDRESS to one that has it"
                yield Problem(f"placement.pools.{name}.resources.{resource}", amount, remedy)


def _fractions(config: RunConfig) -> Iterator[Problem]:
    plan = layout(config)
    for name, pool in config.placement.pools.items():
        amount = (pool.resources or {}).get("GPU")
        share = amount / max(plan.sharing(name), 1) if amount is not None and name in plan.pools else amount
        if share is not None and share > 1 and share % 1:
            remedy = f"gives each of its {plan.sharing(name)} kinds of process {share:g}; above 1 use whole numbers"
            yield Problem(f"placement.pools.{name}.resources.GPU", amount, remedy)


def _names(placement: PlacementConfig) -> str:
    return ", ".join(sorted(placement.pools)) or "the pools, of which there are none"


# Each rule with the options it reads.
PLACEMENT_RULES: tuple[tuple[Callable[[RunConfig], Iterator[Problem]], tuple[str, ...]], ...] = (
    (_local, LAYOUT),
    (_unused, LAYOUT),
    (_map, (*LAYOUT, "algorithm")),
    (_tensor_parallel, LAYOUT),
    (_fractions, LAYOUT),
)
MACHINE_RULES: tuple[tuple[Callable[[RunConfig], Iterator[Problem]], tuple[str, ...]], ...] = (
    (_cpus, LAYOUT),
    (_devices, LAYOUT),
    (_custom_resources, LAYOUT),
)
