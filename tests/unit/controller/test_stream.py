"""Rows that arrive one by one: the way they go, what is handed out, and the share that they add up to."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.batch import Batch
from engine.controller.dispatch import deal
from engine.controller.stream import Arriving, Outbox, Route, Show
from engine.errors import TransientError

HANG_S = 60.0


def batch(*numbers: int) -> Batch:
    return Batch(
        {"group_ids": torch.tensor(numbers, dtype=torch.int64), "sample_ids": torch.zeros(len(numbers)).long()}
    )


@pytest.mark.parametrize("sources", [1, 2, 3])
@pytest.mark.parametrize("targets", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 7, 30])
def test_every_row_goes_where_dealing_out_the_whole_puts_it(sources: int, targets: int, count: int) -> None:
    whole = batch(*range(count))
    made = [share.group_ids.tolist() for share in deal(whole, sources)]
    for target, share in enumerate(deal(whole, targets)):
        routes = [Route(source, sources, target, targets) for source in range(sources)]
        found = [
            (place, number)
            for route, numbers in zip(routes, made, strict=True)
            for row, number in enumerate(numbers)
            if (place := route.place(row)) is not None
        ]
        assert sorted(found) == list(enumerate(share.group_ids.tolist()))


class TestOutbox:
    ALL = Route(0, 1, 0, 1)
    WHOLE = batch(*range(10, 20))

    def taken(self, outbox: Outbox, call: int, seen: int = 0, route: Route = ALL, wait_s: float = 0.0) -> list[Any]:
        """Places, numbers of the rows, rows seen, whether the call has ended."""
        taken = outbox.take(call, seen, route, ["group_ids"], wait_s)
        places, part = taken.part or ([], self.WHOLE.index([]).select(["group_ids"]))
        assert list(part.fields) == ["group_ids"]
        return [places, part.group_ids.tolist(), taken.seen, taken.ended]

    def outbox(self, call: int, *rows: int) -> Outbox:
        outbox = Outbox()
        outbox.begin(call)
        for row in rows:
            outbox.put(row, self.WHOLE.index)
        return outbox

    def test_rows_are_handed_out_once_in_the_order_in_which_they_were_finished(self) -> None:
        outbox = self.outbox(1)
        assert self.taken(outbox, 1) == [[], [], 0, False]
        for row in (2, 0):
            outbox.put(row, self.WHOLE.index)
        assert self.taken(outbox, 1) == [[2, 0], [12, 10], 2, False]
        outbox.put(1, self.WHOLE.index)
        outbox.end()
        assert self.taken(outbox, 1, 2) == [[1], [11], 3, True]

    def test_rows_of_another_share_are_seen_and_stay(self) -> None:
        assert self.taken(self.outbox(1, 0, 1, 2, 3), 1, 0, Route(0, 1, 1, 2)) == [[0, 1], [11, 13], 4, False]

    def test_a_call_that_is_over_has_nothing_more_and_one_to_come_has_not_begun(self) -> None:
        assert self.taken(Outbox(), 1) == [[], [], 0, False]
        outbox = self.outbox(2, 0)
        assert self.taken(outbox, 1, wait_s=HANG_S) == [[], [], 0, True]
        assert self.taken(outbox, 3) == [[], [], 0, False]

    def test_the_end_of_the_call_ends_the_wait(self) -> None:
        outbox = self.outbox(1)
        timer = threading.Timer(0.2, lambda: (outbox.put(4, self.WHOLE.index), outbox.end()))
        timer.start()
        assert self.taken(outbox, 1, wait_s=HANG_S) == [[4], [14], 1, True]


def shown(*parts: list[int], then: Callable[[], Batch]) -> Arriving:
    def fetch(show: Show) -> Batch:
        for rows in parts:
            show(rows, batch(*(10 * row for row in rows)))
        return then()

    return Arriving(fetch)


def failed() -> Batch:
    raise TransientError("The engine is gone.")


class TestArriving:
    def test_everyone_gets_every_row_once_in_one_order(self) -> None:
        share = shown([2], [4, 0], then=lambda: batch(0, 10, 20, 30, 40))
        for _ in range(2):
            came = [(rows, part.group_ids.tolist()) for rows, part in share.parts()]
            assert came == [([2], [20]), ([4, 0], [40, 0]), ([1, 3], [10, 30])]

    def test_a_row_is_there_before_the_rest(self) -> None:
        used = threading.Event()

        def rest() -> Batch:
            assert used.wait(HANG_S), "the first row was not given"
            return batch(0, 10)

        share = shown([1], then=rest)
        assert next(share.parts())[0] == [1]
        assert share.since == 0.0
        used.set()
        assert [rows for rows, _ in share.parts()] == [[1], [0]]
        assert share.since > 0.0

    def test_nothing_at_all(self) -> None:
        assert list(shown(then=batch).parts()) == []

    def test_what_went_wrong_is_raised_to_everyone_who_waits(self) -> None:
        share = shown([0], then=failed)
        for _ in range(2):
            with pytest.raises(TransientError, match="gone"):
                list(share.parts())
