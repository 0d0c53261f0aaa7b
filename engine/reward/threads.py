"""Calls side by side, in threads that hold up nothing: a process that ends does not wait for a scorer that is stuck."""

import threading
from collections.abc import Callable, Iterable, Sized
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(call: Callable[[Item], Result], items: Iterable[Item], *, at_once: int) -> list[Result]:
    """The results of all items, in order; at most `at_once` calls are under way.

    items: may arrive one after the other; where the next is waited for, the calls of those before it go on.
    After a call that raises no other begins; those under way are waited for, then the first error by place is raised.
    """
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}
    numbered = enumerate(items)
    lock = threading.Lock()

    def work() -> None:
        place = 0
        try:
            while True:
                with lock:
                    taken = next(numbered, None)
                if taken is None or errors:
                    return
                place, item = taken
                results[place] = call(item)
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            errors[place] = error

    most = min(at_once, len(items)) if isinstance(items, Sized) else at_once
    threads = [threading.Thread(target=work, daemon=True) for _ in range(most)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[place] for place in range(len(results))]
