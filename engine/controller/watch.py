"""Watch: notices at once that a process of this host has ended, and within seconds that one was stopped; says how."""

import fcntl
import os
import selectors
import signal
import struct
import threading
from collections.abc import Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

GIB = 2**30
LOOK_S = 0.5  # between two looks at memory and state
_PIDFD_GET_INFO, _WITH_EXIT = 0xC040FF0B, 1 << 3
_EXITING = 0x4
NOTICED_S = 30.0  # for the end of a process that has begun to end
STOPPED_S = 4.0  # a process that is stopped this long does not come back by itself


@dataclass(frozen=True)
class Loss:
    """A process that a run cannot go on without."""

    roles: tuple[str, ...]
    rank: int | None  # None = a part of Ray
    pid: int
    how: str  # a clause: "was ended by SIGKILL"
    memory: int | None  # bytes when last looked at; None = it never was

    def where(self, called: str) -> dict[str, str | int]:
        """Place for an error: the role that was called, if it lived there, else all that did."""
        place: dict[str, str | int] = {"role": called if called in self.roles else "+".join(self.roles)}
        if self.rank is not None:
            place["rank"] = self.rank
        place["pid"] = self.pid
        if self.memory is not None:
            place["memory at death"] = f"{self.memory / GIB:.2f} GiB"
        return place


@dataclass
class _Watched:
    roles: tuple[str, ...]
    rank: int | None
    pid: int
    descriptor: int
    memory: int | None = None
    stopped: float = field(default=0.0)  # seconds for which it was seen stopped


class Watch:
    """Watches processes from a thread of its own until it is closed; `lost` is set to the first loss."""

    def __init__(self) -> None:
        self.lost: Future[Loss] = Future()
        self._lock = threading.Lock()
        self._watched: dict[int, _Watched] = {}
        self._selector = selectors.DefaultSelector()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def add(self, pid: int, roles: tuple[str, ...], rank: int | None) -> None:
        """Watch a process of this host."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._report(_Watched(roles, rank, pid, -1), "had ended before it was watched")
            return
        with self._lock:
            self._watched[pid] = _Watched(roles, rank, pid, descriptor)
            self._selector.register(descriptor, selectors.EVENT_READ, pid)

    def require_noticed(self) -> None:
        """Return once `lost` tells of any part of Ray that is ending now.

        Its sockets break before its end can be waited for, and Ray terminates a process that writes to them.
        """
        with self._lock:
            parts = [process for process in self._watched.values() if process.rank is None]
        ending = next((process for process in parts if is_ending(process.pid)), None)
        if ending is not None and not wait([self.lost], NOTICED_S).done:
            self._report(ending, f"is ending and was still there {NOTICED_S:g} s later")

    def forget(self, pids: Iterable[int]) -> None:
        """These processes are about to be ended."""
        with self._lock:
            for pid in pids:
                self._drop(pid)

    def close(self) -> None:
        """Watch nothing any more."""
        self._closed.set()
        self._thread.join()
        self.forget(list(self._watched))
        self._selector.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            for key, _ in self._selector.select(LOOK_S):
                self._ended(key.data)
            with self._lock:
                watched = list(self._watched.values())
            for process in watched:
                self._look(process)

    def _ended(self, pid: int) -> None:
        with self._lock:
            process = self._watched.get(pid)
            if process is None:
                return
            how = how_ended(pid, process.descriptor)
        self._report(process, how)  # before it is dropped: at no moment is it neither watched nor lost
        self.forget([pid])

    def _look(self, process: _Watched) -> None:
        with suppress(psutil.NoSuchProcess):  # the selector tells of its end
            seen = psutil.Process(process.pid)
            if seen.status() == psutil.STATUS_ZOMBIE:
                return
            process.memory = seen.memory_info().rss
            process.stopped = process.stopped + LOOK_S if seen.status() == psutil.STATUS_STOPPED else 0.0
            if process.stopped >= STOPPED_S:
                self._report(process, "was stopped and did not continue (SIGSTOP)")

    def _drop(self, pid: int) -> None:
        if process := self._watched.pop(pid, None):
            self._selector.unregister(process.descriptor)
            os.close(process.descriptor)

    def _report(self, process: _Watched, how: str) -> None:
        with self._lock:
            if not self.lost.done():
                self.lost.set_result(Loss(process.roles, process.rank, process.pid, how, process.memory))


def is_ending(pid: int) -> bool:
    """Whether a process has ended, is ending (man proc_pid_stat: flag PF_EXITING), or has a SIGKILL waiting for it."""
    try:
        state, *values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    waiting = int(status.partition("SigPnd:")[2].split()[0], 16) | int(status.partition("ShdPnd:")[2].split()[0], 16)
    return state in "ZX" or bool(int(values[5]) & _EXITING) or bool(waiting >> (signal.SIGKILL - 1) & 1)


def how_ended(pid: int, descriptor: int) -> str:
    """How a process ended, by its signal or exit code, if the system still shows it."""
    code = _code_of_zombie(pid)
    if code is None:
        code = _code_of_reaped(descriptor)
    if code is None:
        return "ended"
    if number := code & 0x7F:
        return f"was ended by {signal.Signals(number).name}"
    return f"ended with exit code {code >> 8}"


def _code_of_zombie(pid: int) -> int | None:
    """Wait status of a process whose parent has not asked for it yet (man proc_pid_stat)."""
    try:
        state, *values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(values[-1]) if state == "Z" else None


def _code_of_reaped(descriptor: int) -> int | None:
    """Wait status afterwards, which kernels from 6.15 on tell (PIDFD_GET_INFO); struct pidfd_info: mask first, code last."""
    info = bytearray(struct.pack("=Q56x", _WITH_EXIT))
    try:
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    mask, code = struct.unpack("=Q52xi", info)
    return code if mask & _WITH_EXIT else None
