"""torch.distributed for one group: rank 0 binds a free port itself and keeps it, so no port is guessed."""

from datetime import timedelta

import torch.distributed as dist

from engine.backends.device import collective_backend, pick_device


def open_store(host: str, timeout_s: float) -> dist.TCPStore:
    """Rank 0: a store listening at this address of its node, on a port the system chose (`store.port`)."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def join(store: dist.TCPStore | None, host: str, port: int, rank: int, world_size: int, timeout_s: float) -> None:
    """Every rank: join the group behind the store (rank 0 passes the one it opened)."""
    limit = timedelta(seconds=timeout_s)
    if store is None:
        store = dist.TCPStore(host, port, is_master=False, timeout=limit)
    dist.init_process_group(
        collective_backend(pick_device()), store=store, rank=rank, world_size=world_size, timeout=limit
    )
