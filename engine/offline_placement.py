"""The processes of a run on fixed rows: the model that learns and, where it is compared with, the frozen reference."""

from contextlib import ExitStack

from engine.controller.group import WorkerGroup
from engine.controller.layout import PoolPlan
from engine.controller.local_group import LocalGroup
from engine.controller.mesh import Mesh
from engine.controller.worker import Worker, WorkerContext
from engine.dataflows.offline_roles import OfflineRoles
from engine.offlineconfig import SCORE_MODELS, OfflineConfig
from engine.placed import Placed
from engine.runs import Run
from engine.workers.preference import PreferenceWorker
from engine.workers.score import ScoreWorker

_POOL = "train"


def workers_of(config: OfflineConfig) -> dict[str, type[Worker]]:
    """Role -> the program of its ranks. The name of the role is part of the seed of random weights."""
    if config.objective.name in SCORE_MODELS:
        return {"model": ScoreWorker}
    frozen: dict[str, type[Worker]] = {"reference": PreferenceWorker} if config.objective.name == "dpo" else {}
    return {"model": PreferenceWorker, **frozen}


def place_offline(run: Run[OfflineConfig], *, met_before: bool = False) -> Placed[OfflineRoles]:
    """Start every role of the run, all in the same processes; met_before and errors as those of `engine.placement.place`."""
    if run.config.placement.mode == "local":
        return _place_local(run)
    return _place_on_ray(run, met_before)


def _place_local(run: Run[OfflineConfig]) -> Placed[OfflineRoles]:
    groups: dict[str, WorkerGroup] = {}
    with ExitStack() as stack:
        for role, worker in workers_of(run.config).items():
            group = LocalGroup(worker, WorkerContext(role, 0, 1, run.config, run.source))
            stack.callback(group.close)
            groups[role] = group
        return Placed(OfflineRoles(**groups), stack.pop_all())


def _place_on_ray(run: Run[OfflineConfig], met_before: bool) -> Placed[OfflineRoles]:
    from engine.controller import cluster, pool, ray_group  # the import costs seconds that a local run does not need

    placement, workers = run.config.placement, workers_of(run.config)
    ranks, tensor = placement.ranks, run.config.train.tensor_parallel
    plan = PoolPlan(ranks)
    groups: dict[str, WorkerGroup] = {}
    with ExitStack() as stack:
        stack.enter_context(cluster.cluster(run.key))
        pool.require_capacity({_POOL: plan}, met_before=met_before)
        own = stack.enter_context(pool.Pool(_POOL, plan, 1, placement.timeout_s))
        builds = ray_group.Builds()
        hosts = ray_group.HostSet("+".join(workers), own, ranks, run.key, placement.call_timeout_s, builds)
        stack.callback(hosts.close)
        for role, worker in workers.items():
            hosts.add(worker, [WorkerContext(role, rank, ranks, run.config, run.source) for rank in range(ranks)])
            groups[role] = ray_group.RayGroup(role, hosts, Mesh(tensor=tensor, data=ranks // tensor))
        return Placed(OfflineRoles(**groups), stack.pop_all())
