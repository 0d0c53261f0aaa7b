"""Rows of a result that go to who needs them while the rest is being made, and the share that they add up to."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from engine.batch import Batch

Part = tuple[list[int], Batch]  # rows of a share and where they stand in it
Show = Callable[[list[int], Batch], None]
Result = Callable[[Sequence[int]], Batch]  # rows of a result, of which these are finished


@dataclass(frozen=True)
class Route:
    """The way from the result of one rank of a group to the share of one rank of another; rows of both are dealt out in turn."""

    source: int
    sources: int
    target: int
    targets: int

    def place(self, row: int) -> int | None:
        """Where a row of the source's result stands in the target's share; None = it belongs to another rank."""
        whole = self.source + row * self.sources
        return whole // self.targets if whole % self.targets == self.target else None


@dataclass(frozen=True)
class Taken:
    """What was finished of a share since last asked, if anything, and whether more may come."""

    part: Part | None
    seen: int  # rows of the source, those of other shares included
    ended: bool


class Outbox:
    """Finished rows of the call that this process is busy with, in the order in which they were finished.

    Filled by the thread that makes them and forgotten with the next call; `take` may be called from any other.
    """

    def __init__(self) -> None:
        self._call = 0
        self._ended = True
        self._rows: list[int] = []
        self._result: Result | None = None
        self._changed = threading.Condition()

    def begin(self, call: int) -> None:
        """Calls are numbered in the order in which they are carried out, from 1."""
        with self._changed:
            self._call, self._ended, self._rows, self._result = call, False, [], None
            self._changed.notify_all()

    def put(self, row: int, result: Result) -> None:
        """One more row of the result is finished."""
        with self._changed:
            self._rows.append(row)
            self._result = result

    def end(self) -> None:
        """The call is over, whether it succeeded or not."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def take(self, call: int, seen: int, route: Route, reads: Sequence[str], wait_s: float) -> Taken:
        """Rows of a call from number `seen` on that go the route, cut down to what is read; none of a call before this one.

        Waits until the call is over, at most wait_s: rows that are finished one by one go together.
        """
        with self._changed:
            self._changed.wait_for(lambda: (self._call, self._ended) >= (call, True), wait_s)
            if call != self._call:
                return Taken(None, seen, ended=call < self._call)
            rows, result, ended = self._rows[seen:], self._result, self._ended
        placed = [(place, row) for row in rows if (place := route.place(row)) is not None]
        if not placed or result is None:
            return Taken(None, seen + len(rows), ended)
        part = result([row for _, row in placed])
        return Taken(([place for place, _ in placed], part.select(reads) if reads else part), seen + len(rows), ended)


class Arriving:
    """A rank's share of a batch that is still being made, for methods declared with `streams`.

    fetch: called in a thread of its own; shows rows as they come and returns the whole share, which is what counts: rows
    that were not shown are taken from it. What it raises is raised wherever rows are waited for.
    """

    def __init__(self, fetch: Callable[[Show], Batch]) -> None:
        self.since = 0.0  # time.perf_counter() when the share was complete; 0 = it is not yet
        self._fetch = fetch
        self._parts: list[Part] = []
        self._error: Exception | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="arriving", daemon=True).start()

    def parts(self) -> Iterator[Part]:
        """Every row in one part, as it comes; the same parts for everyone who asks."""
        number = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: number < len(self._parts) or self._over())  # noqa: B023 - asked at once
                if self._error is not None:
                    raise self._error
                if number == len(self._parts):
                    return
                part = self._parts[number]
            yield part
            number += 1

    def _over(self) -> bool:
        return self.since > 0.0 or self._error is not None

    def _run(self) -> None:
        try:
            whole = self._fetch(self._show)
        except Exception as error:  # noqa: BLE001 - raised again where it is waited for
            with self._changed:
                self._error = error
                self._changed.notify_all()
            return
        shown = {row for rows, _ in self._parts for row in rows}
        rest = [row for row in range(len(whole)) if row not in shown]
        with self._changed:
            self._parts += [(rest, whole.index(rest))] if rest else []
            self.since = time.perf_counter()
            self._changed.notify_all()

    def _show(self, rows: list[int], part: Batch) -> None:
        with self._changed:
            self._parts.append((rows, part))
            self._changed.notify_all()
