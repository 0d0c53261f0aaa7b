"""Lease of a run on object storage: of all machines one process writes; numbered objects, made exclusively, tell which.

owner/00007 is made once and never changed or removed; the highest number owns the run until owner/00007.released is there or
owner/00007.beat is older than EXPIRY_S. The local lease is taken as well: two processes of one machine share a cache.
"""

import json
import logging
import os
import re
import socket
import time
import uuid
from pathlib import Path
from typing import Any

from engine.errors import HybridFlowError, StoreError
from engine.lease import EXPIRY_S, Lease, lease_of, process_lives
from engine.remote import Place, place_of
from engine.roots import RECORD, mark_cache

log = logging.getLogger(__name__)
_OWNER = re.compile(r"owner/(\d{5,})")
_CLOCK = "owner/clock"  # written to learn what time it is where the heartbeats are stamped
_TRIES = 3
_NOWHERE = uuid.uuid4().hex  # a machine that cannot be told from others is no other process's

_LEASES: dict[Path, "RemoteLease"] = {}


def lease_in(folder: Path) -> Lease:
    """This process's lease of a run directory, of a local root or of a URL."""
    found = _LEASES.get(folder.resolve())
    if found is None:
        place = place_of(folder, own_connections=True)
        if place is None:
            return lease_of(folder)
        found = _LEASES.setdefault(folder.resolve(), RemoteLease(folder, place))
    return found


class RemoteLease(Lease):
    """The owner objects of one run.

    tenure: number of the one that is ours, 0 = none; swept: the tenure in which leftovers at the storage were removed.
    """

    def __init__(self, folder: Path, place: Place) -> None:
        super().__init__(folder)
        self._folder = folder
        self._place = place
        self._beaten = 0.0  # monotonic time of the last heartbeat that arrived
        self.tenure = 0
        self.swept = 0

    @property
    def held(self) -> bool:
        """Whether this object holds the lease, as far as it knows: `check` asks the storage."""
        return self.tenure > 0 and self._owns()

    def acquire(self) -> None:
        """Become the owner, with the run's record as it is at the storage. Raises StoreError naming the living owner."""
        if self.held:
            return
        mark_cache(self._folder.parent)
        super().acquire()
        try:
            self.tenure = self._claim()
            if not bring_record(self._folder, self._place) and (self._folder / RECORD).is_file():
                self._place.write(RECORD, (self._folder / RECORD).read_bytes())
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Give the lease back; where the storage cannot be told, it expires by itself."""
        tenure, self.tenure = self.tenure, 0
        try:
            if tenure:
                self._place.write(_released(tenure), b"")
        except HybridFlowError as error:
            log.warning("Others can use the run in %.0f s: its lease could not be given back: %s", EXPIRY_S, error)
        super().release()

    def check(self) -> None:
        """Raise StoreError unless this object holds the lease, TransientError if the storage cannot be asked."""
        super().check()
        if time.monotonic() - self._beaten > EXPIRY_S / 2:  # nobody may take it for dead while it writes
            self._send_beat(self.tenure)
        newest = max(self._numbers())
        if newest != self.tenure:
            owner = self._owner_of(newest)
            raise StoreError(
                f"Process {owner['pid']} on {owner['host']} has taken this run over since {owner['since']}.",
                path=self._place.url,
                remedy="Nothing more is written by this process. Resume the run once the other one has ended.",
            )

    def works_here(self) -> bool:
        """Whether a living process of this machine owns the cache of the run, this one included."""
        owner = super().owner()
        return owner is not None and bool(owner["alive"])

    def owner(self) -> dict[str, Any] | None:
        """The holder (host, pid, since, fence, alive) or None."""
        names = self._names()
        newest = max(_numbers(names), default=0)
        if not newest or _released(newest) in names:
            return None
        owner = self._owner_of(newest)
        return {**owner, "alive": self._lives(newest, owner, names, time.time())}

    def _claim(self) -> int:
        """Make the next owner object. Raises StoreError where the newest one belongs to a living process."""
        for _ in range(_TRIES):
            names = self._names()
            newest = max(_numbers(names), default=0)
            if newest and _released(newest) not in names:
                if self._owner_of(newest)["token"] == self._token:  # made, or given back, while the storage was away
                    self._send_beat(newest)
                    return newest
                self._require_dead(newest, names)
            content = json.dumps(self._present(newest + 1) | {"machine": _machine()}, indent=1).encode()
            name = _object(newest + 1)
            if self._place.create(name, content) or self._place.read(name) == content:  # an answer may be lost
                self._send_beat(newest + 1)
                return newest + 1
        remedy = "Try again, or start a run with another --run-key."
        raise StoreError("Other processes took this run over at the same time.", path=self._place.url, remedy=remedy)

    def _require_dead(self, number: int, names: set[str]) -> None:
        self._place.write(_CLOCK, b"")
        owner = self._owner_of(number)
        if self._lives(number, owner, names, self._place.modified(_CLOCK)):
            remedy = "Wait for it, cancel it, or start a run with another --run-key."
            if owner["machine"] != _machine():
                remedy += f" If it died, the run is free {EXPIRY_S:.0f} s after its last sign of life."
            raise StoreError(
                f"This run belongs to process {owner['pid']} on {owner['host']} (since {owner['since']}).",
                path=self._place.url,
                remedy=remedy,
            )

    def _lives(self, number: int, owner: dict[str, Any], names: set[str], now: float) -> bool:
        """now: seconds since the epoch by the clock that stamps the heartbeats, as near as it is known."""
        if owner["machine"] == _machine():
            return process_lives(owner)
        sign = _beat(number) if _beat(number) in names else _object(number)
        return now - self._place.modified(sign) < EXPIRY_S

    def _renew(self) -> None:
        super()._renew()
        if tenure := self.tenure:
            try:
                self._send_beat(tenure)
            except HybridFlowError as error:
                log.warning("The storage does not know that this process lives: %s", error)

    def _send_beat(self, number: int) -> None:
        began = time.monotonic()
        self._place.write(_beat(number), b"")
        self._beaten = began

    def _names(self) -> set[str]:
        return set(self._place.sizes("owner"))

    def _numbers(self) -> list[int]:
        """Numbers of all owners so far. Raises StoreError if there are none: ours was removed."""
        if found := _numbers(self._names()):
            return found
        remedy = "Nothing more is written by this process. Find out who deletes objects of the run, then resume."
        raise StoreError("The lease is not at the storage any more.", path=f"{self._place.url}/owner", remedy=remedy)

    def _owner_of(self, number: int) -> dict[str, Any]:
        name = _object(number)
        try:
            owner: dict[str, Any] = json.loads(self._place.read(name) or b"")
            if missing := {"token", "pid", "host", "since", "started", "machine"} - owner.keys():
                raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        except (ValueError, AttributeError) as error:
            remedy = f"If no process uses the run, make an empty object {_released(number)} beside it."
            raise StoreError(
                f"The owner of the run cannot be read: {error}.", path=f"{self._place.url}/{name}", remedy=remedy
            ) from error
        return owner


def bring_record(folder: Path, place: Place) -> bool:
    """Make the local record of a run that at the storage; whether there is one."""
    content = place.read(RECORD)
    if content is not None:
        mark_cache(folder.parent)
        write_whole(folder / RECORD, content)
    return content is not None


def write_whole(file: Path, content: bytes) -> None:
    """Replace a local file in one step; its folder is made."""
    if file.is_file() and file.read_bytes() == content:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}")
    temporary.write_bytes(content)
    temporary.rename(file)


def _numbers(names: set[str]) -> list[int]:
    return [int(match[1]) for name in names if (match := _OWNER.fullmatch(name))]


def _object(number: int) -> str:
    return f"owner/{number:05d}"


def _beat(number: int) -> str:
    return f"{_object(number)}.beat"


def _released(number: int) -> str:
    return f"{_object(number)}.released"


def _machine() -> str:
    """Where process numbers mean the same processes: host, boot and process namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {_NOWHERE}"
