"""The Ray cluster of a run: the one that the environment names, or one of its own that ends with it."""

import ctypes
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Read when Ray is imported. Without it Ray takes the driver's parent for the node, and where that parent is gone (nohup, a
# container's first process) it ends a driver whose node has died, at once and without a word.
os.environ.setdefault("RAY_RAYLET_PID", str(os.getpid()))

import ray

from engine.errors import TransientError

OBJECT_STORE_BYTES = 512 * 2**20  # of the embedded cluster; batches of tokens are small
# Nobody reads what an embedded cluster reports of itself, and a driver whose node or head has died waits up to 25 s to send it.
_UNREPORTED = {"enable_metrics_collection": False, "task_events_report_interval_ms": 0}


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
        options["address"] = "local"  # else Ray joins whatever cluster was last started on this machine
        options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES, "num_cpus": os.cpu_count()}
        options["_system_config"] = _UNREPORTED
    with _sigterm_kept():
        try:
            ray.init(**options)
        except Exception as error:  # Ray raises bare exceptions for nodes that are slow, full or unreachable
            ray.shutdown()
            where = os.environ.get("RAY_ADDRESS", "an embedded cluster")
            raise TransientError(
                f"Ray did not start ({where}): {error}",
                remedy="Free memory, cores or ports of this machine, or check RAY_ADDRESS; then resume.",
            ) from error
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
