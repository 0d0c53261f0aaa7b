"""What a scorer sees and returns: samples in, one finite float or one reason for every sample out."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, Protocol

# none: the scorer declined; input: the row lacks what the scorer needs; not_finite: NaN or inf; error: it raised;
# type: it returned no number; start: it could not be loaded; timeout: it was killed; lost: its process ended;
# unreachable: a service gave no answer, however often it was asked; refused: a service answered that it never will.
Cause = Literal["none", "input", "not_finite", "error", "type", "start", "timeout", "lost", "unreachable", "refused"]
FAULTS = ("type", "refused")  # causes that no retry heals: the user has to change something


@dataclass(frozen=True)
class Sample:
    """One response to be scored; index names it in messages.

    token_ids: prompt and response as the policy has them; empty where no reward model scores.
    """

    prompt: str
    response: str
    answer: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    index: int = 0
    response_tokens: int = 0
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Unscored:
    """Why a sample has no score. Never replaced by 0: that would move the baseline of its siblings."""

    cause: Cause
    reason: str


Score = float | Unscored


class Scorer(Protocol):
    """One component of the reward."""

    def score(self, samples: Iterable[Sample]) -> list[Score]:
        """One entry per sample, in order, in reward units. Samples may arrive while those before them are scored."""
        ...

    def close(self) -> None:
        """Give back processes and connections; the scorer is not used again."""
        ...


def as_score(value: object) -> Score:
    """The value as a finite float, or why it is none.

    Accepted: int, float, bool, numpy numbers. None, NaN and inf leave the sample unscored. Anything else (strings,
    dicts, lists, arrays, tensors, coroutines) has the cause "type": a fault of the scorer that no retry heals.
    """
    if value is None:
        return Unscored("none", "the scorer returned None")
    if not isinstance(value, Real):
        return Unscored("type", f"returned {type(value).__name__}; return one float, bool or None per sample")
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return Unscored("not_finite", "the scorer returned an integer beyond all floats")
    if not math.isfinite(number):
        return Unscored("not_finite", f"the scorer returned {number}")
    return number
