"""Ray side of the controller: the cluster, resource pools, host processes and the groups of roles that live in them."""

import ctypes
import logging
import os
import signal
import socket
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.controller import process_group
from engine.controller.group import WorkerGroup, worker_error
from engine.controller.worker import Worker, WorkerContext
from engine.errors import TransientError

log = logging.getLogger(__name__)
OBJECT_STORE_BYTES = 512 * 2**20  # of the embedded cluster; batches of tokens are small
# Engine and trainers share the cores: threads that wait for work sleep instead of spinning. Without it the quickstart's
# supervised stage takes a third longer while the engine starts.
_YIELD_CORES = {"OMP_WAIT_POLICY": "PASSIVE"}
RUN_TAG = "HYBRIDFLOW_RUN"  # environment variable carried by every process of a run


@contextmanager
def cluster(run_key: str) -> Iterator[None]:
    """The cluster of RAY_ADDRESS, or an embedded one that starts and ends with this block."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {
        "namespace": f"hybridflow-{run_key}",
        "log_to_driver": False,
        "logging_level": logging.ERROR,
    }
    if "RAY_ADDRESS" not in os.environ:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_worker_niceness", "0")  # everything else of the run waits for the workers
        options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES, "num_cpus": os.cpu_count()}
    with _sigterm_kept():
        ray.init(**options)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Ray's C++ side takes SIGTERM over and aborts the process three seconds after one; Python gets it back."""
    libc, kept = ctypes.CDLL(None), ctypes.create_string_buffer(256)  # larger than any struct sigaction
    libc.sigaction(signal.SIGTERM, None, kept)
    try:
        yield
    finally:
        libc.sigaction(signal.SIGTERM, kept, None)


class Host:
    """A process on the cluster: one rank of every role placed in it."""

    def __init__(self, rank: int, world_size: int, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self._rank = rank
        self._world_size = world_size
        self._store: Any = None
        self._workers: dict[str, Worker] = {}

    def open_store(self, timeout_s: float) -> tuple[str, int]:
        """Rank 0: listen on a free port for the other ranks."""
        self._store, host, port = process_group.open_store(timeout_s)
        return host, port

    def join(self, host: str, port: int, timeout_s: float) -> None:
        """Enter the torch.distributed group of these hosts."""
        process_group.join(self._store, host, port, self._rank, self._world_size, timeout_s)

    def add(self, worker: type[Worker], context: WorkerContext) -> None:
        """Build one role's worker here."""
        with _errors(context.role, self._rank, "constructor"):
            self._workers[context.role] = worker(context)

    def execute(self, role: str, method: str, arguments: tuple[Any, ...]) -> Any:
        """Run one method of one role."""
        with _errors(role, self._rank, method):
            return getattr(self._workers[role], method)(*arguments)

    def describe(self) -> dict[str, Any]:
        """Process id and machine, for messages about this host."""
        return {"pid": os.getpid(), "node": socket.gethostname()}

    def close(self) -> None:
        """Release every role."""
        for worker in self._workers.values():
            worker.close()


@contextmanager
def _errors(role: str, rank: int, method: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised again in a form that the controller can unpickle
        raise worker_error(error, role, rank, method, traceback.format_exc()) from None


class Pool:
    """Resources reserved for `ranks` processes, shared evenly by the host sets placed in it."""

    def __init__(self, name: str, ranks: int, sharing: int, timeout_s: float) -> None:
        self.name = name
        self.ranks = ranks
        self.sharing = sharing
        self.gpus = ray.cluster_resources().get("GPU", 0.0) >= 1
        bundle = {"CPU": 1.0, "GPU": 1.0} if self.gpus else {"CPU": 1.0}
        self._group: PlacementGroup = placement_group([dict(bundle) for _ in range(ranks)], strategy="PACK")
        if not self._group.wait(timeout_s):
            remove_placement_group(self._group)
            available = {key: value for key, value in ray.available_resources().items() if key in ("CPU", "GPU")}
            raise TransientError(
                f"Pool {name} asked for {ranks} x {bundle}; the cluster has {available} free.",
                remedy=f"Waited {timeout_s:g} s. Lower placement.ranks, free the cluster or raise placement.timeout_s.",
            )

    def options(self, rank: int, run_key: str, threads: int) -> dict[str, Any]:
        """Ray actor options of one host in this pool."""
        share = 1.0 / self.sharing
        return {
            "num_cpus": share,
            "num_gpus": share if self.gpus else 0,
            "max_restarts": 0,
            "name": f"{self.name}-{rank}-{uuid.uuid4().hex[:8]}",
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank),
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(threads), **_YIELD_CORES, RUN_TAG: run_key}},
        }

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        remove_placement_group(self._group)


class HostSet:
    """The processes, one per rank, that one or several colocated roles run in."""

    def __init__(self, name: str, pool: Pool, ranks: int, run_key: str, timeout_s: float) -> None:
        self.name = name
        self.ranks = ranks
        self._timeout_s = timeout_s
        self._building: dict[str, list[Any]] = {}
        threads = max((os.cpu_count() or 1) // ranks, 1)
        actor = ray.remote(Host)
        self._actors = [
            actor.options(**pool.options(rank, run_key, threads)).remote(rank, ranks, threads) for rank in range(ranks)
        ]
        if ranks > 1:
            host, port = self._get(name, "open_store", [self._actors[0].open_store.remote(timeout_s)])[0]
            self._get(name, "join", [actor.join.remote(host, port, timeout_s) for actor in self._actors])

    def add(self, worker: type[Worker], contexts: list[WorkerContext]) -> None:
        """Begin building a role on every rank; a failure is raised by the role's first call."""
        self._building[contexts[0].role] = [
            actor.add.remote(worker, context) for actor, context in zip(self._actors, contexts, strict=True)
        ]

    def start(self, role: str, method: str, arguments: list[tuple[Any, ...]]) -> Callable[[], list[Any]]:
        """Begin a role's method on every rank; the returned function waits for it."""
        if role in self._building:
            self._get(role, "constructor", self._building[role])
            del self._building[role]
        started = [actor.execute.remote(role, method, own) for actor, own in zip(self._actors, arguments, strict=True)]
        return lambda: self._get(role, method, started)

    def close(self) -> None:
        """End the processes; those that do not end by themselves within a few seconds are killed."""
        closing = [actor.close.remote() for actor in self._actors]
        ray.wait(closing, num_returns=len(closing), timeout=5.0)
        for actor in self._actors:
            ray.kill(actor)

    def _get(self, role: str, method: str, started: list[Any]) -> list[Any]:
        # The first rank to fail explains the others, which may hang in a collective: wait for whoever is ready.
        waiting = list(started)
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=self._timeout_s)
            if not ready:
                raise TransientError(
                    f"{method} did not return within {self._timeout_s:g} s.",
                    role=role,
                    rank=started.index(waiting[0]),
                    remedy="The workers are rebuilt from the last commit. Raise placement.call_timeout_s if slow.",
                )
            self._result(role, method, started.index(ready[0]), ready[0])
        return [self._result(role, method, rank, ref) for rank, ref in enumerate(started)]

    def _result(self, role: str, method: str, rank: int, ref: Any) -> Any:
        try:
            return ray.get(ref, timeout=self._timeout_s)
        except RayTaskError as error:
            if error.cause is None:
                raise
            raise error.cause from None
        except (RayActorError, GetTimeoutError) as error:
            raise TransientError(
                f"The process of {role} ended during {method}: {error}.",
                role=role,
                rank=rank,
                remedy="The workers are rebuilt from the last committed step.",
            ) from error


class RayGroup(WorkerGroup):
    """One role on the hosts of a set."""

    def __init__(self, role: str, hosts: HostSet) -> None:
        super().__init__(role, hosts.ranks)
        self._hosts = hosts

    def _start(self, method: str, arguments: list[tuple[Any, ...]]) -> Callable[[], list[Any]]:
        return self._hosts.start(self.role, method, arguments)
