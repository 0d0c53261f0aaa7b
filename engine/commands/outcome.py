"""What a command hands back: plain values for --json, text for people, the exit code; and how a failure is put."""

import sys
import traceback
from dataclasses import dataclass
from typing import Any

from engine.errors import CancelledError, DivergedError, HybridFlowError

EXIT_CODES = {"completed": 0, "rejected": 3}
UNEXPECTED = 5
_RESULT = (  # keys of the result of `run` and `resume`
    "status",
    "run_key",
    "run_dir",
    "iterations_planned",
    "iterations_done",
    "iterations_reused",
    "seconds",
    "weights_sha256",
    "metrics",
    "evaluation",
    "gate",
    "model",
)


@dataclass(frozen=True)
class Outcome:
    """The end of a command. content: one JSON object; text: for people, on standard output."""

    content: dict[str, Any]
    text: str
    exit_code: int = 0


def failure(
    error: BaseException, *, verbose: bool, result: dict[str, Any] | None = None, log: str = "", resume: str = ""
) -> Outcome:
    """The outcome of a command that raised, and its message on standard error.

    result: what is known of the run, its status included; log: file with the traceback; resume: what continues it.
    """
    if verbose:
        traceback.print_exception(error, file=sys.stderr)
    error = _root(error)
    message, remedy, code = _in_words(error, log)
    if resume and code not in (2, DivergedError.exit_code):  # what was stopped for quality would stop again
        remedy = f"{remedy} Continue with: {resume}".strip()
    print(f"error: {message}" + (f"\n{remedy}" if remedy else ""), file=sys.stderr, flush=True)
    status = "cancelled" if code == CancelledError.exit_code else "failed"
    content = dict.fromkeys(_RESULT) | {"status": status} | (result or {})
    content["error"] = {"type": type(error).__name__, "message": message, "remedy": remedy}
    return Outcome(content, "", code)


def _root(error: BaseException) -> BaseException:
    """The error to tell: one of ours behind a foreign one, which reporting ours may have raised (on a full disk, say)."""
    behind: BaseException | None = error
    while behind is not None and isinstance(error, Exception):
        if isinstance(behind, HybridFlowError):
            return behind
        behind = behind.__cause__ or behind.__context__
    return error


def _in_words(error: BaseException, log: str) -> tuple[str, str, int]:
    """Message, remedy and exit code."""
    if isinstance(error, HybridFlowError):
        place = ", ".join(f"{key} {value}" for key, value in error.where.items())
        return (f"{error.message} [{place}]" if place else error.message), error.remedy, error.exit_code
    if not isinstance(error, Exception):  # Ctrl-C, SIGTERM, exit
        return "The command was cancelled.", "", CancelledError.exit_code
    where = f"The traceback is in {log}." if log else "Run it again with --verbose for the traceback."
    return f"{type(error).__name__}: {error}", where, UNEXPECTED
