"""Lease of a run directory: one living process writes; a second is refused, a dead one replaced with a higher fence."""

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from engine.errors import StoreError

HEARTBEAT_S = 10.0
EXPIRY_S = 60.0  # a holder on another host that did not beat for this long is taken for dead


_LEASES: dict[Path, "Lease"] = {}


def lease_of(folder: Path) -> "Lease":
    """This process's lease of a run directory: every opener in one process shares it."""
    return _LEASES.setdefault(folder.resolve(), Lease(folder.resolve()))


class Lease:
    """The OWNER file of one run directory.

    One process has one lease per folder (`lease_of`); `check` before every write makes a holder that was replaced stop.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "OWNER"
        self._lock = folder / ".OWNER.lock"
        self._token = uuid.uuid4().hex
        self._stop = threading.Event()
        self._beating: threading.Thread | None = None
        self._fence = 0  # of our last time as the owner

    @property
    def held(self) -> bool:
        """Whether this object holds the lease now."""
        return self._owns()

    def acquire(self) -> None:
        """Become the owner. Raises StoreError naming the living owner, before anything is written."""
        with self._locked():
            owner = self._read()
            if owner is not None and owner["token"] == self._token:
                return
            if owner is not None and self._alive(owner):
                raise StoreError(
                    f"This run belongs to process {owner['pid']} on {owner['host']} (since {owner['since']}).",
                    path=str(self._file),
                    remedy="Wait for it, cancel it, or start a run with another --run-key.",
                )
            if owner is None:
                self._require_no_silent_holder()
            self._write(fence=owner["fence"] + 1 if owner else 1)
        self._stop.clear()
        self._beating = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._beating.start()

    def release(self) -> None:
        """Give the lease back, if it is still ours."""
        self._stop.set()
        with self._locked():
            if self._owns():
                self._file.unlink()

    def check(self) -> None:
        """Raise StoreError unless this object holds the lease."""
        if self.held:
            return
        owner = self._read()
        holder = f"process {owner['pid']} on {owner['host']} holds it" if owner else "nobody holds it"
        raise StoreError(
            f"This process does not own the run directory ({holder}).",
            path=str(self._file),
            remedy="Nothing was written. Resume the run once the other process has ended.",
        )

    def owner(self) -> dict[str, Any] | None:
        """The holder (host, pid, since, fence, alive) or None."""
        owner = self._read()
        return None if owner is None else {**owner, "alive": self._alive(owner)}

    def _owns(self) -> bool:
        owner = self._read()
        return owner is not None and owner["token"] == self._token

    def _alive(self, owner: dict[str, Any]) -> bool:
        if owner["host"] != socket.gethostname():
            return time.time() - self._file.stat().st_mtime < EXPIRY_S
        return process_lives(owner)

    def _require_no_silent_holder(self) -> None:
        """An empty lease names nobody, as after a crash of the machine; but a living holder would fill it in again."""
        if not self._is_empty():
            return
        age = time.time() - self._file.stat().st_mtime
        if age < EXPIRY_S:
            raise StoreError(
                f"The lease file is empty, and was written {age:.0f} s ago: a living owner would restore it.",
                path=str(self._file),
                remedy=f"Try again in {EXPIRY_S - age:.0f} s; it is taken over if it is still empty then.",
            )

    def _is_empty(self) -> bool:
        return self._file.is_file() and not self._file.read_text().strip()

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            with suppress(FileNotFoundError):  # released a moment ago
                self._renew()

    def _renew(self) -> None:
        if self._owns():
            os.utime(self._file)
            return
        with self._locked():
            if self._is_empty() and not self._stop.is_set():
                self._write(self._fence)

    def _read(self) -> dict[str, Any] | None:
        try:
            text = self._file.read_text()
            if not text.strip():
                return None
            content: dict[str, Any] = json.loads(text)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise StoreError(
                f"The lease file does not parse: {error}.",
                path=str(self._file),
                remedy="Delete it if no process uses the run.",
            ) from error
        return content

    def _write(self, fence: int) -> None:
        self._fence = fence
        owner = self._present(fence)
        temporary = self._file.with_name(".OWNER.new")
        temporary.write_text(json.dumps(owner, indent=1))
        temporary.rename(self._file)

    def _present(self, fence: int) -> dict[str, Any]:
        """What is told of this process as the owner."""
        return {
            "token": self._token,
            "fence": fence,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": psutil.Process().create_time(),
            "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            stream = self._lock.open("w")
        except OSError as error:
            raise StoreError(
                f"The run directory is not writable: {error.strerror}.",
                path=str(self._lock),
                remedy="Fix its permissions.",
            ) from error
        with stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield


def process_lives(owner: dict[str, Any]) -> bool:
    """Whether the process of an owner on this machine still runs."""
    try:
        process = psutil.Process(owner["pid"])
        same = abs(process.create_time() - owner["started"]) < 1.0  # a later process may have the same number
        return bool(same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
