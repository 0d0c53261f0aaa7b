"""Worker processes that stay up between tests and share the seconds that importing torch and transformers takes."""

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

HANG_S = 240.0
PRELOADED = ["engine.backends.modelling", "engine.backends.tensor_parallel", "torch.distributed.fsdp"]


class Ranks:
    """`world_size` processes in one gloo group; `run` calls a module-level function on all of them.

    They are forked from one server without threads that has imported torch and transformers once for all of them.
    """

    def __init__(self, world_size: int, rendezvous: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, world_size, str(rendezvous)), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Results of function(rank, world_size, *arguments) in rank order; AssertionError with what a rank raised."""
        for connection in self._connections:
            connection.send_bytes(pickle.dumps((function, arguments)))
        waiting, answers = dict(enumerate(self._connections)), {}
        while waiting:
            ready = wait(list(waiting.values()), timeout=HANG_S)
            if not ready:
                self.close()
                raise TimeoutError(f"ranks {sorted(waiting)} gave no answer for {HANG_S:.0f} s")
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                answers[rank] = pickle.loads(waiting.pop(rank).recv_bytes())  # noqa: S301 - of our own child
                if isinstance(answers[rank], _Failure):
                    self.close()
                    raise AssertionError(f"rank {rank} failed:\n{answers[rank].text}")
        return [answers[rank] for rank in range(len(self._connections))]

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for process in self._processes:
            process.kill()
            process.join()


class _Failure:
    def __init__(self, text: str) -> None:
        self.text = text


def _serve(connection: Connection, rank: int, world_size: int, rendezvous: str) -> None:
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timedelta(seconds=HANG_S)
    )
    while True:
        try:
            function, arguments = pickle.loads(connection.recv_bytes())  # noqa: S301 - of our own parent
        except EOFError:
            return
        try:
            answer = function(rank, world_size, *arguments)
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - every failure belongs to the test that asked
            answer = _Failure(traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))  # by value: torch's own pickling would share memory of this process
