"""Reward functions as users write them: good, wrong, stuck and broken. Imported by name in scorer processes."""

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

STUCK = 5  # row that the stuck functions never finish


class TwoArguments(Exception):
    """An exception that pickles but does not unpickle."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)


def length(*, prompt: str, response: str, answer: str | None, extra: dict[str, Any]) -> float:
    return float(len(response))


def all_arguments(prompt: str, response: str, answer: str | None, extra: dict[str, Any]) -> float:
    expected = ("question", "reply", "42", {"level": 3})
    return float((prompt, response, answer, extra) == expected)


def marks(*, response: str, extra: dict[str, Any], **_: Any) -> float | None:
    """The length of the response, None for an empty one; makes the file that the row names."""
    if "mark" in extra:
        Path(extra["mark"]).touch()
    time.sleep(extra.get("scoring_s", 0.0))
    return float(len(response)) if response else None


def text_for_one_character(*, response: str, **_: Any) -> Any:
    return "good" if len(response) == 1 else float(len(response))


def returns_extra(*, extra: dict[str, Any], **_: Any) -> Any:
    return extra["returns"]


def returns_numpy(*, extra: dict[str, Any], **_: Any) -> Any:
    import numpy

    return {"float32": numpy.float32(0.5), "int64": numpy.int64(1), "array": numpy.ones((4, 1))}[extra["returns"]]


def raises_on_three(*, extra: dict[str, Any], **_: Any) -> float:
    if extra["row"] == 3:
        raise ZeroDivisionError("row three")
    return 1.0


def raises_always(**_: Any) -> float:
    raise ZeroDivisionError("every row")


def raises_unusually(*, extra: dict[str, Any], **_: Any) -> float:
    match extra["row"]:
        case 1:
            raise TwoArguments(1, "does not unpickle")
        case 2:
            sys.exit("leaving")
        case 3:
            raise KeyboardInterrupt
    return 1.0


def exits_on_three(*, extra: dict[str, Any], **_: Any) -> float:
    if extra["row"] == 3:
        os._exit(9)
    return 1.0


def loops(*, extra: dict[str, Any], **_: Any) -> float:
    while extra["row"] == STUCK:
        pass
    return 1.0


def blocks_in_c(*, extra: dict[str, Any], **_: Any) -> float:
    if extra["row"] == STUCK:
        re.match("(a+)+$", "a" * 40 + "b")  # holds the interpreter for years: no handler of a signal runs
    return 1.0


def ignores_sigterm(*, extra: dict[str, Any], **_: Any) -> float:
    if extra["row"] == STUCK:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)
    return 1.0


def uses_alarm(*, response: str, answer: str | None, **_: Any) -> float:
    def expired(*_: Any) -> NoReturn:
        raise TimeoutError

    signal.signal(signal.SIGALRM, expired)
    signal.alarm(30)
    try:
        return float(response == answer)
    finally:
        signal.alarm(0)


def takes_memory(*, extra: dict[str, Any], **_: Any) -> float:
    return float(len(bytearray(extra["bytes"])) > 0)


def process_id(**_: Any) -> int:
    return os.getpid()
