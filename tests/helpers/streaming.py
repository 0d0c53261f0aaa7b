"""A worker that writes responses row by row, for tests of scoring beside generation."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.batch import Batch
from engine.controller.dispatch import DP, dispatch
from engine.controller.stream import Result
from engine.controller.worker import Worker

HANG_S = 60.0  # a wait that takes this long is a failure


class Writer(Worker):
    """Writes the responses that the rows carry in `extra`, the last row first, and stops where a row says so."""

    shows_rows = True

    @dispatch(DP)
    def generate(self, prompts: Batch) -> Batch:
        """The rows with `response` and `response_lengths`."""
        return _written(prompts, self.show_row)

    @dispatch(DP)
    def generate_unseen(self, prompts: Batch) -> Batch:
        """The same, with nothing shown before the end."""
        return _written(prompts, lambda row, result: None)


def _written(prompts: Batch, show_row: Callable[[int, Result], None]) -> Batch:
    texts = [extra["response"] for extra in prompts.column("extra")]
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.int64)
    answered = prompts.with_fields(response_lengths=lengths).with_columns(response=texts)
    for row in reversed(range(len(prompts))):
        _obey(prompts.column("extra")[row])
        show_row(row, answered.index)
    return answered


def _obey(extra: dict[str, Any]) -> None:
    if "wait_for" in extra:
        _wait(Path(extra["wait_for"]))
    if extra.get("die"):
        os._exit(1)
    if extra.get("fail"):
        raise ZeroDivisionError("no weights were drawn")
    time.sleep(extra.get("pause_s", 0.0))


def _wait(file: Path) -> None:
    deadline = time.monotonic() + HANG_S
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{file.name} was not there after {HANG_S:g} s: nothing was scored")
        time.sleep(0.02)
