"""Rules that are pure, fast and bounded, and so run in the calling process."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache

from engine.reward.scorer import Sample, Score, Unscored

# Quantifiers are bounded: the text is as long and as odd as a policy makes it.
_STATED = r"(?:\b(?i:answer|choice|option)\b(?:\s{{1,3}}(?i:is|must be|should be|would be)\b|\s{{0,3}}[:=])|\\boxed)"
_BETWEEN = r"[\s:=*_$({{\[\"'`]{{0,8}}"
_ALONE = r"(?<![\w'’-])([{choices}])(?![\w'’-])"
# A sign counts unless it follows a digit or a bracket ("10-4" ends with 4, "= -4" with -4); commas only separate groups
# of three digits.
_NUMBER = re.compile(
    r"(?:(?<![\d)])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?"
)
_SMALL_NEXT = re.compile(r"\s{1,3}[a-z]")
NO_ANSWER = Unscored("input", "the row has no reference answer")


@dataclass(frozen=True)
class RuleScorer:
    """A rule applied to each sample by itself."""

    rule: Callable[[Sample], Score]

    def score(self, samples: Iterable[Sample]) -> list[Score]:
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


@lru_cache
def _choice_patterns(choices: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What states a choice ("the answer is (B)", "Answer: B", "\\boxed{B}"), and a letter that stands by itself."""
    stated = re.compile((_STATED + _BETWEEN + _ALONE).format(choices=choices))
    return stated, re.compile(_ALONE.format(choices=choices))


def last_choice(text: str, choices: str) -> str | None:
    """The letter that the text states last; where it states none, the last capital letter that stands by itself.

    "A" and "I" before a small letter are English words, not choices, unless they are stated.
    """
    stated, alone = _choice_patterns(choices)
    if found := stated.findall(text):
        return str(found[-1])
    letters = [
        match[1] for match in alone.finditer(text) if match[1] not in "AI" or not _SMALL_NEXT.match(text, match.end())
    ]
    return letters[-1] if letters else None


def choice(sample: Sample, *, choices: str) -> Score:
    """1 where response and answer name the same choice, else 0; a response that names none is wrong."""
    if sample.answer is None:
        return NO_ANSWER
    answer = last_choice(sample.answer, choices)
    if answer is None:
        return Unscored("input", f"the answer {sample.answer!r} is none of the choices {', '.join(choices)}")
    return float(last_choice(sample.response, choices) == answer)


def tagged(sample: Sample, *, tags: tuple[str, ...]) -> Score:
    """1 where the response is <tag>...</tag> for each of the tags, once and in order, with only white space between."""
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    text = sample.response
    if any(text.count(mark) != 1 for mark in marks):
        return 0.0
    places = [text.index(mark) for mark in marks]
    ends = [place + len(mark) for place, mark in zip(places, marks, strict=True)]
    outside = [
        text[: places[0]],
        *(text[end:start] for end, start in zip(ends[1::2], [*places[2::2], None], strict=True)),
    ]
    return float(places == sorted(places) and not "".join(outside).strip())
