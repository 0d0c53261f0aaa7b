"""torch.distributed for one group: rank 0 binds a free port itself and keeps it, so no port is guessed."""

import socket
from datetime import timedelta

import torch
import torch.distributed as dist


def open_store(timeout_s: float) -> tuple[dist.TCPStore, str, int]:
    """Rank 0: a store listening on a port the system chose; returns it with the address others use."""
    host = socket.gethostbyname(socket.gethostname())
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    return store, host, store.port


def join(store: dist.TCPStore | None, host: str, port: int, rank: int, world_size: int, timeout_s: float) -> None:
    """Every rank: join the group behind the store (rank 0 passes the one it opened)."""
    limit = timedelta(seconds=timeout_s)
    if store is None:
        store = dist.TCPStore(host, port, is_master=False, timeout=limit)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
