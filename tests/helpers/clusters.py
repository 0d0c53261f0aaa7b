"""Ray clusters on this machine that runs under test connect to, instead of starting one each."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
from ray.cluster_utils import Cluster

from engine.controller.ray_group import RUN_TAG

OBJECT_STORE_BYTES = 512 * 2**20


@contextmanager
def cluster_of(*nodes: dict[str, float]) -> Iterator[str]:
    """Address of a cluster with these nodes, each given by its resources; ended with the block."""
    kept = dict(os.environ)
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    cluster = Cluster()
    try:
        for resources in nodes:
            custom = {key: amount for key, amount in resources.items() if key != "CPU"}
            cluster.add_node(
                num_cpus=resources["CPU"],
                num_gpus=0,
                resources=custom,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
            )
        yield cluster.address
    finally:
        cluster.shutdown()
        for name in os.environ.keys() - kept.keys():
            del os.environ[name]
        os.environ.update(kept)


def processes_of(run_key: str) -> list[psutil.Process]:
    """Living processes that carry a run's tag."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_TAG) == run_key and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
