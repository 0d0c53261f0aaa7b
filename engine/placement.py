"""Placement: the processes and resources a run's roles are given, and the groups that reach them."""

from contextlib import ExitStack

from engine.config import RunConfig
from engine.controller.group import WorkerGroup
from engine.controller.layout import layout, roles_of
from engine.controller.local_group import LocalGroup
from engine.controller.mesh import Mesh
from engine.controller.worker import Worker, WorkerContext
from engine.dataflows.roles import Roles
from engine.placed import Placed
from engine.runs import Run
from engine.workers.cost import CostCriticWorker, CostWorker
from engine.workers.critic import CriticWorker
from engine.workers.policy import PolicyWorker
from engine.workers.reference import ReferenceWorker
from engine.workers.reward import RewardWorker
from engine.workers.rollout import RolloutWorker
from engine.workers.trained import TrainedWorker

WORKERS: dict[str, type[Worker]] = {
    "rollout": RolloutWorker,
    "policy": PolicyWorker,
    "reward": RewardWorker,
    "reference": ReferenceWorker,
    "critic": CriticWorker,
    "cost": CostWorker,
    "cost_critic": CostCriticWorker,
}


def place(run: Run[RunConfig], *, met_before: bool = False) -> Placed[Roles]:
    """Start every role of the run where the configuration puts it.

    met_before: whether this cluster has held the run already. What it can never hold is a TransientError then and else a
    ConfigError; what it does not have free in time is a TransientError. All name what is missing.
    """
    if run.config.placement.mode == "local":
        return _place_local(run)
    return _place_on_ray(run, met_before)


def _place_local(run: Run[RunConfig]) -> Placed[Roles]:
    groups: dict[str, WorkerGroup] = {}
    with ExitStack() as stack:
        for role in roles_of(run.config):
            group = LocalGroup(WORKERS[role], WorkerContext(role, 0, 1, run.config, run.source, run.models))
            stack.callback(group.close)
            groups[role] = group
        return Placed(Roles(**groups), stack.pop_all())


def _place_on_ray(run: Run[RunConfig], met_before: bool) -> Placed[Roles]:
    from engine.controller import cluster, pool, ray_group  # the import costs seconds that a local run does not need

    placement, plan = run.config.placement, layout(run.config)
    groups: dict[str, WorkerGroup] = {}
    with ExitStack() as stack:
        stack.enter_context(cluster.cluster(run.key))
        pool.require_capacity(plan.pools, met_before=met_before)
        # Ray gives a pool back when the run leaves the cluster; asking it to would hang if a part of it was lost.
        pools = {
            name: pool.Pool(name, own, plan.sharing(name), placement.timeout_s) for name, own in plan.pools.items()
        }
        builds = ray_group.Builds()
        stack.callback(builds.watch.close)
        for own in plan.sets:
            hosts = ray_group.HostSet(
                own.name,
                pools[own.pool],
                own.ranks,
                run.key,
                placement.call_timeout_s,
                builds,
                shows_rows=any(WORKERS[role].shows_rows for role in own.roles),
            )
            stack.callback(hosts.close)
            for role in own.roles:
                hosts.add(WORKERS[role], _contexts(run, role, own.ranks))
                groups[role] = ray_group.RayGroup(role, hosts, _mesh(run.config, role, own.ranks))
        return Placed(Roles(**groups), stack.pop_all())


def _mesh(config: RunConfig, role: str, ranks: int) -> Mesh:
    """Models that are trained or scored with may be cut into tensor-parallel parts; engines and scorers are whole."""
    tensor = config.train.tensor_parallel if issubclass(WORKERS[role], TrainedWorker) else 1
    return Mesh(tensor=tensor, data=ranks // tensor)


def _contexts(run: Run[RunConfig], role: str, ranks: int) -> list[WorkerContext]:
    return [WorkerContext(role, rank, ranks, run.config, run.source, run.models) for rank in range(ranks)]
