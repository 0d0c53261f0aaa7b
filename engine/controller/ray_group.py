"""Ray side of the controller: host processes and the groups of roles that live in them."""

import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil

os.environ.setdefault("RAY_RAYLET_PID", str(os.getpid()))  # see cluster.py

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError

from engine.batch import Batch
from engine.controller import process_group
from engine.controller.dispatch import Arguments, Padded, Transfer, perform, shares
from engine.controller.group import Pending, Running, Span, WorkerGroup, worker_error
from engine.controller.mesh import Mesh
from engine.controller.pool import Pool
from engine.controller.promise import REBUILT, Promise
from engine.controller.stream import Arriving, Outbox, Route, Show, Taken
from engine.controller.watch import Loss, Watch
from engine.controller.worker import Worker, WorkerContext
from engine.errors import TransientError

RUN_TAG = "HYBRIDFLOW_RUN"  # environment variable carried by every process of a run
ROLES_TAG = "HYBRIDFLOW_ROLES"  # environment variable that tells what a worker process is for
# Engine and trainers share the cores: threads that wait for work sleep instead of spinning. Without it the quickstart's
# supervised stage takes a third longer while the engine starts.
_YIELD_CORES = {"OMP_WAIT_POLICY": "PASSIVE"}
_TOGETHER_S = 0.1  # rows of a result that are finished within it travel together
_READERS = 16  # ranks that wait for rows at once; others take turns
_END_S = 3.0  # for a process that Ray was told to end
_RAY = {"raylet": "Ray's node (raylet)", "gcs_server": "Ray's head (gcs_server)"}  # processes it cannot go on without


class Host:
    """A process on the cluster: one rank of every role placed in it."""

    def __init__(self, rank: int, world_size: int, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self._rank = rank
        self._world_size = world_size
        self._store: Any = None
        self._workers: dict[str, Worker] = {}
        self._outbox = Outbox()

    def identity(self) -> tuple[str, int]:
        """Host name and process id."""
        return socket.gethostname(), os.getpid()

    def open_store(self, timeout_s: float) -> tuple[str, int]:
        """Rank 0: listen on a free port, at the address by which the cluster knows this node."""
        host = ray.util.get_node_ip_address()
        self._store = process_group.open_store(host, timeout_s)
        return host, self._store.port

    def join(self, host: str, port: int, timeout_s: float) -> None:
        """Enter the torch.distributed group of these hosts."""
        process_group.join(self._store, host, port, self._rank, self._world_size, timeout_s)

    def add(self, worker: type[Worker], context: WorkerContext) -> None:
        """Build one role's worker here."""
        with _errors(context.role, self._rank, "constructor"):
            self._workers[context.role] = built = worker(context)
            built.show_row = self._outbox.put

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator, unused-ignore]
    def execute(self, call: int, role: str, method: str, mesh: Mesh, *arguments: Any) -> tuple[Span, Any]:
        """When one method of one role ran, and its result; a Promise is fetched here and this rank's share of it kept.

        Work on rows that arrive before their share is complete is no part of the span: it costs the step nothing.
        """
        self._outbox.begin(call)
        try:
            with _errors(role, self._rank, method):
                bound = getattr(self._workers[role], method)
                own = tuple(self._own(bound, value, mesh) for value in arguments)
                started = time.perf_counter()
                result = perform(bound, own)
        finally:
            self._outbox.end()
        complete = [value.since for value in own if isinstance(value, Arriving)]
        seconds = time.perf_counter() - max(started, *complete, 0.0)
        return Span(time.time() - seconds, seconds), result

    def close(self) -> None:
        """Release every role."""
        for worker in self._workers.values():
            worker.close()

    def _own(self, bound: Callable[..., Any], value: Any, mesh: Mesh) -> Any:
        """What this rank is given for an argument."""
        if not isinstance(value, Promise):
            return value

        def share() -> Any:
            return shares(bound, value.fetch(), mesh)[self._rank]

        def followed(show: Show) -> Any:
            value.follow(self._rank, mesh.size, bound.reads, show)  # type: ignore[attr-defined]
            return share()

        return Arriving(followed) if value.streams_to(bound) else share()


class ShowingHost(Host):
    """A process whose roles show rows of their results: it hands them out while it is busy with the call."""

    @ray.method(concurrency_group="stream")  # type: ignore[untyped-decorator, unused-ignore]
    def take(self, call: int, seen: int, route: Route, reads: Sequence[str]) -> Taken:
        """What was finished since `seen`, as engine.controller.stream.Outbox has it."""
        return self._outbox.take(call, seen, route, reads, _TOGETHER_S)


@contextmanager
def _errors(role: str, rank: int, method: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised again in a form that the controller can unpickle
        raise worker_error(error, role, rank, method, traceback.format_exc()) from None


class Builds:
    """What may fail anywhere in a run while one call is waited for: processes, and constructors that still run."""

    def __init__(self) -> None:
        self.running: dict[Any, tuple[str, int]] = {}  # reference -> role, rank
        self.starting: dict[Any, tuple[HostSet, int]] = {}  # reference -> set, rank of a process
        self.watch = Watch()
        for child in psutil.Process().children():  # those of an embedded cluster
            # Ray does not always collect what was killed of the cluster before this one.
            if child.name() in _RAY and child.status() != psutil.STATUS_ZOMBIE:
                self.watch.add(child.pid, (_RAY[child.name()],), None)

    def settle(self, ref: Any, timeout_s: float) -> None:
        """Take a constructor, or the start of a process, that is finished off the list. Raises what it raised."""
        if ref in self.running:
            role, rank = self.running.pop(ref)
            _get(ref, role, rank, "constructor", timeout_s)
            return
        hosts, rank = self.starting.pop(ref)
        host, pid = _get(ref, hosts.name, rank, "the start of its process", timeout_s)
        if host == socket.gethostname():
            hosts.watched(pid, rank)

    def require_all(self, role: str, method: str) -> None:
        """Raise TransientError if a process of this host was lost: nothing is to be asked of Ray any more."""
        self.watch.require_noticed()
        if self.watch.lost.done():
            raise _lost(self.watch.lost.result(), role, method)


class HostSet:
    """The processes, one per rank, that one or several colocated roles run in."""

    def __init__(
        self,
        name: str,
        pool: Pool,
        ranks: int,
        run_key: str,
        timeout_s: float,
        builds: Builds,
        *,
        shows_rows: bool = False,
    ) -> None:
        self.name = name
        self.ranks = ranks
        self._calls = 0
        self._timeout_s = timeout_s
        self._builds = builds
        self._here: list[psutil.Process] = []
        threads = max((os.cpu_count() or 1) // ranks, 1)
        environment = {"OMP_NUM_THREADS": str(threads), **_YIELD_CORES, RUN_TAG: run_key, ROLES_TAG: name}
        actor = ray.remote(concurrency_groups={"stream": _READERS})(ShowingHost) if shows_rows else ray.remote(Host)
        self._actors = [
            actor.options(**pool.options(rank, environment)).remote(rank, ranks, threads) for rank in range(ranks)
        ]
        self.showing = tuple(self._actors) if shows_rows else ()
        builds.starting |= {actor.identity.remote(): (self, rank) for rank, actor in enumerate(self._actors)}
        if ranks > 1:
            opened = [self._actors[0].open_store.remote(timeout_s)]
            host, port = self.wait(name, "open_store", opened)[0]
            self.wait(name, "join", [actor.join.remote(host, port, timeout_s) for actor in self._actors])

    def watched(self, pid: int, rank: int) -> None:
        """Notice from now on if this process of this host ends."""
        with suppress(psutil.NoSuchProcess):
            self._here.append(psutil.Process(pid))
        self._builds.watch.add(pid, tuple(self.name.split("+")), rank)

    def add(self, worker: type[Worker], contexts: list[WorkerContext]) -> None:
        """Begin building a role on every rank; a failure is raised by whatever call is waited for next."""
        for rank, (actor, context) in enumerate(zip(self._actors, contexts, strict=True)):
            self._builds.running[actor.add.remote(worker, context)] = (context.role, rank)

    def start(
        self, role: str, method: str, mesh: Mesh, arguments: list[Arguments]
    ) -> tuple[int, list[tuple[Any, Any]]]:
        """Begin a role's method on every rank, once the role is built; the call's number, and references to span and result
        of each."""
        self._builds.require_all(role, method)
        while building := [ref for ref, (built, _) in self._builds.running.items() if built == role]:
            self._settle_next(role, self._builds.running[building[0]][1], "constructor", building)
        stored: dict[int, Any] = {}
        self._calls += 1
        return self._calls, [
            actor.execute.remote(self._calls, role, method, mesh, *(_stored(value, stored) for value in own))
            for actor, own in zip(self._actors, arguments, strict=True)
        ]

    def wait(self, role: str, method: str, started: Sequence[Any]) -> list[Any]:
        """Small results of all ranks. The first rank to fail explains the others, which may hang in a collective."""
        waiting = list(started)
        while waiting:
            ready = self._settle_next(role, started.index(waiting[0]), method, waiting)
            if ready in waiting:
                _get(ready, role, started.index(ready), method, self._timeout_s)
                waiting.remove(ready)
        return self.fetch(role, method, dict(enumerate(started)))

    def fetch(self, role: str, method: str, refs: Mapping[int, Any]) -> list[Any]:
        """Results that are ready; refs: rank -> reference."""
        self._builds.require_all(role, method)
        return [_get(ref, role, rank, method, self._timeout_s) for rank, ref in refs.items()]

    def close(self) -> None:
        """End the processes; those that do not end by themselves within a few seconds are killed.

        After a loss at once: the others may wait for what was lost, and Ray's calls hang if it was a part of Ray.
        """
        watch = self._builds.watch
        watch.forget(process.pid for process in self._here)
        if not watch.lost.done():
            closing = [actor.close.remote() for actor in self._actors]
            ray.wait(closing, num_returns=len(closing), timeout=5.0)
        if not (watch.lost.done() and watch.lost.result().rank is None):
            for actor in self._actors:
                ray.kill(actor)
        # Ray reports a process that is killed while it is being ended as one that died, also at the end of a good run.
        _, alive = psutil.wait_procs(self._here, timeout=0.0 if watch.lost.done() else _END_S)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def _settle_next(self, role: str, rank: int, method: str, waiting: Sequence[Any]) -> Any:
        """The next reference to become ready, of these or of the run's constructors, which are taken off their list.

        role, rank, method: of the first of those waited for, to be named if none becomes ready in time.
        """
        others = [*self._builds.starting, *self._builds.running]
        ready = _first_ready([*others, *(ref for ref in waiting if ref not in others)], self._timeout_s, self._builds)
        self._builds.require_all(role, method)
        if ready is None:
            raise TransientError(
                f"{method} did not return within {self._timeout_s:g} s.",
                role=role,
                rank=rank,
                remedy=f"{REBUILT} Raise placement.call_timeout_s if the call is only slow.",
            )
        if ready in others:
            self._builds.settle(ready, self._timeout_s)
        return ready


def _first_ready(refs: Sequence[Any], timeout_s: float, builds: Builds) -> Any:
    """The first of these references to small results that is ready; None if none becomes so in time or a process is lost.

    Waits in Python: what a signal handler raises while Ray waits in C++ (other than KeyboardInterrupt) is lost there,
    and a SIGTERM with it.
    """
    futures = [ref.future() for ref in refs]
    done = wait([*futures, builds.watch.lost], timeout=timeout_s, return_when=FIRST_COMPLETED).done
    return next((ref for ref, future in zip(refs, futures, strict=True) if future in done), None)


def _lost(loss: Loss, role: str, method: str) -> TransientError:
    return TransientError(
        f"The process of {'+'.join(loss.roles)} {loss.how} during {method}.", **loss.where(role), remedy=REBUILT
    )


def _stored(value: Any, stored: dict[int, Any]) -> Any:
    """A reference in place of a batch, the same for every rank that is sent the same object."""
    if not isinstance(value, Batch | Padded):
        return value
    if id(value) not in stored:
        stored[id(value)] = ray.put(value)
    return stored[id(value)]


def _get(ref: Any, role: str, rank: int, method: str, timeout_s: float) -> Any:
    try:
        return ray.get(ref, timeout=timeout_s)
    except RayTaskError as error:
        if error.cause is None:
            raise
        raise error.cause from None
    except (RayActorError, ObjectLostError, GetTimeoutError) as error:
        raise TransientError(
            f"The process of {role} ended during {method}: {error}.", role=role, rank=rank, remedy=REBUILT
        ) from error


@dataclass(frozen=True)
class RayCall(Running):
    """A method under way on the hosts of a set."""

    hosts: HostSet
    role: str
    method: str
    number: int  # among the calls of these hosts
    refs: list[tuple[Any, Any]]  # of span and result, by rank

    def wait(self) -> list[Span]:
        """When every rank was inside the method; no result is fetched."""
        return self.hosts.wait(self.role, self.method, [span for span, _ in self.refs])

    def results(self, ranks: Sequence[int]) -> list[Any]:
        """Results of these ranks, brought to this process."""
        return self.hosts.fetch(self.role, self.method, {rank: self.refs[rank][1] for rank in ranks})

    def promise(self, transfer: Transfer, mesh: Mesh) -> Promise:
        """What the call will return."""
        parts = tuple(self.refs[rank][1] for rank in transfer.sources(mesh))
        return Promise(self.role, self.method, transfer, parts, self.number, self.hosts.showing)


class RayGroup(WorkerGroup):
    """One role on the hosts of a set."""

    def __init__(self, role: str, hosts: HostSet, mesh: Mesh) -> None:
        super().__init__(role, mesh)
        self._hosts = hosts

    def _spread(self, method: Callable[..., Any], value: Any) -> Sequence[Any]:
        if isinstance(value, Pending) and isinstance(value.running, RayCall):
            return [value.running.promise(value.transfer, value.group.mesh)] * self.mesh.size
        return super()._spread(method, value)

    def _start(self, method: str, arguments: list[Arguments]) -> RayCall:
        number, refs = self._hosts.start(self.role, method, self.mesh, arguments)
        return RayCall(self._hosts, self.role, method, number, refs)
