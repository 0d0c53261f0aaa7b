"""Placement: which roles a run needs, which processes they live in, and the groups that reach them."""

from contextlib import ExitStack
from dataclasses import dataclass

from engine.config import PPOConfig, RunConfig
from engine.controller.group import WorkerGroup
from engine.controller.local_group import LocalGroup
from engine.controller.worker import Worker, WorkerContext
from engine.dataflows.roles import Roles
from engine.runs import Run
from engine.workers.critic import CriticWorker
from engine.workers.policy import PolicyWorker
from engine.workers.reference import ReferenceWorker
from engine.workers.reward import RewardWorker
from engine.workers.rollout import RolloutWorker


@dataclass(frozen=True)
class Placed:
    """The running groups of a run and, in `stack`, how to end them."""

    roles: Roles
    stack: ExitStack

    def close(self) -> None:
        """End everything, last started first."""
        self.stack.close()


def workers_of(config: RunConfig) -> dict[str, type[Worker]]:
    """The roles this run needs and their programs."""
    workers: dict[str, type[Worker]] = {"rollout": RolloutWorker, "policy": PolicyWorker, "reward": RewardWorker}
    if config.needs_reference:
        workers["reference"] = ReferenceWorker
    if isinstance(config.algorithm, PPOConfig):
        workers["critic"] = CriticWorker
    return workers


def process_sets(config: RunConfig) -> dict[str, list[str]]:
    """Process set -> the roles that share its processes. The rollout engine always has processes of its own."""
    roles = list(workers_of(config))
    if config.placement.mode == "standalone":
        return {role: [role] for role in roles}
    return {"rollout": ["rollout"], "train": [role for role in roles if role != "rollout"]}


def place(run: Run) -> Placed:
    """Start every role of the run where the configuration puts it. Raises TransientError naming what is missing."""
    if run.config.placement.mode == "local":
        return _place_local(run)
    return _place_on_ray(run)


def _place_local(run: Run) -> Placed:
    groups: dict[str, WorkerGroup] = {}
    with ExitStack() as stack:
        for role, worker in workers_of(run.config).items():
            group = LocalGroup(worker, WorkerContext(role, 0, 1, run.config, run.source))
            stack.callback(group.close)
            groups[role] = group
        return Placed(Roles(**groups), stack.pop_all())


def _place_on_ray(run: Run) -> Placed:
    from engine.controller import ray_group  # the import costs seconds that a local run does not need

    placement = run.config.placement
    sets = process_sets(run.config)
    ranks = {name: placement.rollout_ranks if name == "rollout" else placement.ranks for name in sets}
    shared = placement.mode == "colocate"
    groups: dict[str, WorkerGroup] = {}
    with ExitStack() as stack:
        stack.enter_context(ray_group.cluster(run.key))
        if shared:
            pool = stack.enter_context(ray_group.Pool("shared", max(ranks.values()), len(sets), placement.timeout_s))
            pools = dict.fromkeys(sets, pool)
        else:
            pools = {
                name: stack.enter_context(ray_group.Pool(name, count, 1, placement.timeout_s))
                for name, count in ranks.items()
            }
        for name, roles in sets.items():
            hosts = ray_group.HostSet(name, pools[name], ranks[name], run.key, placement.call_timeout_s)
            stack.callback(hosts.close)
            for role in roles:
                hosts.add(workers_of(run.config)[role], _contexts(run, role, ranks[name]))
                groups[role] = ray_group.RayGroup(role, hosts)
        return Placed(Roles(**groups), stack.pop_all())


def _contexts(run: Run, role: str, ranks: int) -> list[WorkerContext]:
    return [WorkerContext(role, rank, ranks, run.config, run.source) for rank in range(ranks)]
