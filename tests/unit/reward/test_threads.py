"""Calls side by side."""

import threading
from collections.abc import Iterator

import pytest

from engine.reward.threads import side_by_side


def test_results_keep_their_order_and_no_more_run_than_allowed() -> None:
    running, most, lock = [0], [0], threading.Lock()
    pair = threading.Barrier(2, timeout=60)

    def call(item: int) -> int:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        pair.wait()  # two are always under way, or this never ends
        with lock:
            running[0] -= 1
        return item * item

    assert side_by_side(call, range(6), at_once=2) == [0, 1, 4, 9, 16, 25]
    assert most[0] == 2


def test_the_first_error_by_place_is_raised_and_nothing_new_begins() -> None:
    begun: list[int] = []
    both = threading.Barrier(2, timeout=60)

    def call(item: int) -> int:
        begun.append(item)
        both.wait()
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item 0"):
        side_by_side(call, range(9), at_once=2)
    assert sorted(begun) == [0, 1]


def test_a_call_begins_before_the_next_item_is_there() -> None:
    begun = threading.Event()

    def arriving() -> Iterator[int]:
        yield 1
        assert begun.wait(60), "the first item was not begun"
        yield 2

    def call(item: int) -> int:
        begun.set()
        return 10 * item

    assert side_by_side(call, arriving(), at_once=1) == [10, 20]


def test_an_error_of_what_arrives_is_raised_once_the_calls_under_way_are_done() -> None:
    done: list[int] = []

    def arriving() -> Iterator[int]:
        yield 1
        raise ValueError("no more will come")

    with pytest.raises(ValueError, match="no more will come"):
        side_by_side(done.append, arriving(), at_once=3)
    assert done == [1]


def test_nothing_to_do() -> None:
    assert side_by_side(str, [], at_once=4) == []
