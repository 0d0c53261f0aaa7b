"""The `hybridflow` command: arguments in, one result on standard output, everything else on standard error.

Only what a command needs is imported, when it runs: help and configuration errors come at once.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

from engine import environment
from engine.commands import arguments
from engine.commands.outcome import failure


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code (0, 2, 3, 4, 5 or 130)."""
    environment.set_defaults()
    given = arguments.parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _cancel)
    with _results_only() as stdout:
        try:
            outcome = arguments.call(given)
        except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001 - the last that can tell what happened
            outcome = failure(error, verbose=given.verbose)
        text = json.dumps(outcome.content, default=str) if given.json else outcome.text
        if text:
            print(text, file=stdout, flush=True)
    return outcome.exit_code


@contextmanager
def _results_only() -> Iterator[TextIO]:
    """Standard output for the result alone: what libraries and child processes print there goes to standard error."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(stdout), "w") as stream:
            yield stream
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def _cancel(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends a command as Ctrl-C does."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
