"""Which scorer processes there are."""

import time
from collections.abc import Callable, Iterable

import psutil


def scorer_pids(parent: int | None = None) -> set[int]:
    """Ids of the spawned processes below the parent (this process by default), Python's resource tracker left out."""
    children = psutil.Process(parent).children(recursive=True)
    return {child.pid for child in children if is_running(child.pid) and "spawn_main" in " ".join(child.cmdline())}


def is_running(pid: int) -> bool:
    """Whether the process exists and is more than an entry that nobody collected."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], *, limit_s: float = 30.0) -> None:
    """Return as soon as the condition holds; fail after the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come to hold"
        time.sleep(0.05)


def wait_until_gone(pids: Iterable[int]) -> None:
    """Return as soon as none of the processes runs."""
    wait_until(lambda: not any(is_running(pid) for pid in pids))
