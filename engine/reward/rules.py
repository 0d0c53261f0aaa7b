"""Rules that are pure, fast and bounded, and so run in the calling process."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

from engine.reward.scorer import Sample, Score, Unscored

# A sign counts unless it follows a digit or a bracket ("10-4" ends with 4, "= -4" with -4); commas only separate groups
# of three digits.
_NUMBER = re.compile(
    r"(?:(?<![\d)])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?"
)
NO_ANSWER = Unscored("input", "the row has no reference answer")


@dataclass(frozen=True)
class RuleScorer:
    """A rule applied to each sample by itself."""

    rule: Callable[[Sample], Score]

    def score(self, samples: list[Sample]) -> list[Score]:
        """One entry per sample, in order."""
        return [self.rule(sample) for sample in samples]

    def close(self) -> None:
        """Nothing is held."""


def last_number(text: str) -> Decimal | None:
    """The last number written in the text, thousands separators removed; None where there is none."""
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return Decimal(found[-1].replace(",", "")) if found else None


def exact_match(sample: Sample, *, ignore_case: bool) -> Score:
    """1 where response and answer are the same text apart from surrounding white space, else 0."""
    if sample.answer is None:
        return NO_ANSWER
    response, answer = sample.response.strip(), sample.answer.strip()
    if ignore_case:
        response, answer = response.casefold(), answer.casefold()
    return float(response == answer)


def number(sample: Sample, *, tolerance: float) -> Score:
    """1 where the last numbers of response and answer differ by at most `tolerance`, else 0; in decimal arithmetic."""
    if sample.answer is None:
        return NO_ANSWER
    answer = last_number(sample.answer)
    if answer is None:
        return Unscored("input", f"the answer {sample.answer!r} contains no number")
    response = last_number(sample.response)
    return float(response is not None and abs(response - answer) <= Decimal(repr(tolerance)))


def regex(sample: Sample, *, pattern: re.Pattern[str]) -> Score:
    """1 where the pattern is found anywhere in the response, else 0."""
    return float(pattern.search(sample.response) is not None)
