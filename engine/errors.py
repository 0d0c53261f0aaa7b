"""The exception tree: who must act (user, operator, nobody) decides the class, the class decides retry and exit code.

Every message says what was asked, what was found and what to do. Every exception pickles: it may cross a Ray actor.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One thing the user has to fix: where it stands, what was found there, what to do about it."""

    key: str
    value: Any
    remedy: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value!r}: {self.remedy}"


class HybridFlowError(Exception):
    """Base of every error the project raises on purpose.

    message: what was asked and what was found; remedy: what to do; where: role, rank, path... as plain values.
    """

    exit_code = 5
    retryable = False

    def __init__(self, message: str, *, remedy: str = "", **where: Any) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.where = where

    def __str__(self) -> str:
        place = ", ".join(f"{key} {value}" for key, value in self.where.items())
        text = f"{self.message} [{place}]" if place else self.message
        return f"{text} {self.remedy}".rstrip()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.args, self.__dict__))


def _rebuild(kind: type[HybridFlowError], args: tuple[Any, ...], state: dict[str, Any]) -> HybridFlowError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class _ProblemsError(HybridFlowError):
    """An error that lists everything that is wrong at once, so that one edit fixes all of it."""

    exit_code = 2

    def __init__(self, message: str, *, problems: list[Problem] | None = None, remedy: str = "", **where: Any) -> None:
        self.problems = list(problems or [])
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        super().__init__(message + lines, remedy=remedy, **where)


class ConfigError(_ProblemsError):
    """The configuration cannot work; nothing was started."""


class DataError(_ProblemsError):
    """The data cannot be used as configured; nothing was trained on it."""


class ShapeError(HybridFlowError, ValueError):
    """Tensors or batches that do not fit together: a fault of the caller's code, never retried."""


class DivergedError(HybridFlowError):
    """Training went bad (not finite, collapsed, served weights differ from trained ones); retrying would repeat it."""

    exit_code = 4


class TransientError(HybridFlowError):
    """A worker, a node, a service or a deadline failed; the step can be done again from the last committed one."""

    exit_code = 5
    retryable = True


class DeviceMemoryError(TransientError):
    """A device ran out of memory in a step; the step is done again, once in a run with smaller micro-batches."""


class StoreError(HybridFlowError):
    """A run directory that is corrupt, foreign, owned by somebody else or not writable."""

    exit_code = 5


class WorkerError(HybridFlowError):
    """An unexpected exception inside a role's method: a fault of the code, with the remote traceback; not retried."""


class CancelledError(HybridFlowError):
    """The operator ended the run; every committed step stays usable."""

    exit_code = 130
