"""Layout: which roles share which processes, and which pool of resources each set of processes lives in."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from engine.config import RunConfig


@dataclass(frozen=True)
class PoolPlan:
    """A pool of `ranks` equal shares of the cluster, each for one process of every set placed in it.

    resources: of each share, by Ray's names; None = one CPU and, where the cluster has them, one GPU.
    devices: how many times these resources one share holds.
    """

    ranks: int
    resources: Mapping[str, float] | None = None
    devices: int = 1


@dataclass(frozen=True)
class ProcessSet:
    """Processes, one per rank, that each hold one rank of every role in `roles`."""

    roles: tuple[str, ...]
    pool: str
    ranks: int

    @property
    def name(self) -> str:
        """The roles, for messages."""
        return "+".join(self.roles)


@dataclass(frozen=True)
class Layout:
    """Pools by name and the process sets in them; nothing at all for a run in one process."""

    pools: dict[str, PoolPlan]
    sets: tuple[ProcessSet, ...]

    def sharing(self, pool: str) -> int:
        """Process sets that share a pool."""
        return sum(own.pool == pool for own in self.sets)


def roles_of(config: RunConfig) -> tuple[str, ...]:
    """The roles this run needs."""
    reference = ("reference",) if config.needs_reference else ()
    cost = ("cost",) if config.cost else ()
    return ("rollout", "policy", "reward", *reference, *config.algorithm.critics, *cost)


def layout(config: RunConfig) -> Layout:
    """Where the roles of a run live. The rollout engine always has processes of its own.

    Of an explicit map, roles without a pool that exists are left out; engine.checks refuses such a map.
    """
    placement, engines = config.placement, config.placement.rollout_ranks // config.rollout.tensor_parallel
    others = tuple(role for role in roles_of(config) if role != "rollout")
    if placement.mode == "local":
        return Layout({}, ())
    if placement.mode == "map":
        return _mapped(config)
    if placement.mode == "colocate":
        shared = PoolPlan(max(placement.ranks, placement.rollout_ranks))
        rollout = ProcessSet(("rollout",), "shared", placement.rollout_ranks)
        return Layout({"shared": shared}, (rollout, ProcessSet(others, "shared", placement.ranks)))
    groups = {"train": others} if placement.mode == "split" else {role: (role,) for role in others}
    pools = {name: PoolPlan(placement.ranks) for name in groups}
    sets = tuple(ProcessSet(roles, name, placement.ranks) for name, roles in groups.items())
    pools = {"rollout": PoolPlan(engines, devices=config.rollout.tensor_parallel), **pools}
    return Layout(pools, (ProcessSet(("rollout",), "rollout", engines), *sets))


def ranks_of(config: RunConfig, role: str) -> int:
    """Processes that a role is spread over."""
    return next((own.ranks for own in layout(config).sets if role in own.roles), 1)


def shares_pool(config: RunConfig, role: str) -> bool:
    """Whether other processes than the role's own live in its pool."""
    plan = layout(config)
    return any(role in own.roles and plan.sharing(own.pool) > 1 for own in plan.sets)


Transport = Literal["file", "ipc", "broadcast"]


def transport(config: RunConfig, trainer: str, engine: str) -> Transport:
    """How weights get from the policy into the rollout engines; the only place that decides it.

    trainer, engine: types of the devices on which the two compute. Between GPUs the weights stay on them: as memory that
    both processes of a GPU map ("ipc") where policy and engines share a pool, else broadcast from the first rank of the
    policy. A "file" in shared memory serves a CPU, the engine that knows no transfer (hf), one process for all, and
    engines in shares of a pool that hold no policy.
    """
    if "cpu" in (trainer, engine) or config.rollout.backend != "vllm" or config.placement.mode == "local":
        return "file"
    policy, rollout = (next(own for own in layout(config).sets if role in own.roles) for role in ("policy", "rollout"))
    if policy.pool != rollout.pool:
        return "broadcast"
    return "ipc" if rollout.ranks <= policy.ranks else "file"


def _mapped(config: RunConfig) -> Layout:
    placement, tensor_parallel = config.placement, config.rollout.tensor_parallel
    pools, sets = {}, []
    for name, pool in placement.pools.items():
        roles = tuple(role for role in roles_of(config) if placement.roles.get(role) == name)
        others = tuple(role for role in roles if role != "rollout")
        devices = tensor_parallel if roles == ("rollout",) else 1
        pools[name] = PoolPlan(pool.ranks // devices, pool.resources, devices)
        sets += [ProcessSet(("rollout",), name, pool.ranks // devices)] if "rollout" in roles else []
        sets += [ProcessSet(others, name, pool.ranks)] if others else []
    return Layout(pools, tuple(sets))
