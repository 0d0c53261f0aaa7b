"""Does a component tell a right answer from a wrong one? Asked at the start, through the path that training uses."""

import json
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal

from engine.config import (
    ChoiceReward,
    ExactMatchReward,
    FormatReward,
    HttpReward,
    JsonSchemaReward,
    JudgeReward,
    LengthPenaltyReward,
    MathReward,
    ModelReward,
    NumberReward,
    PythonReward,
    ReasoningGymReward,
    RegexReward,
    RepetitionPenaltyReward,
    RewardConfig,
    needs_answer,
)
from engine.errors import TransientError
from engine.reward.rules import last_choice, last_number
from engine.reward.scorer import FAULTS, Sample, Score, Scorer, Unscored
from engine.reward.verifiers import delimited

Known = Sequence[tuple[Sample, float | None]]  # a response and its score; None = any


def canary_finding(config: RewardConfig, scorer: Scorer, samples: list[Sample]) -> str | None:
    """What is wrong with the component and what to do about it; None if it works.

    Where there is a right answer, it must score more than a wrong one; one good row is enough, so that a single odd
    answer does not stop a run. Rules without a right answer must give known responses their known scores. A model, a function
    and a service that compares with no answer, are asked only to score: what is right is its own business.
    Raises TransientError if a service cannot be reached: nothing has to be changed for the next attempt.
    """
    match config:
        case ModelReward():
            return _model_finding(scorer, samples)
        case ExactMatchReward() | NumberReward() | MathReward() | ChoiceReward():
            return _contrast_finding(config, scorer, samples, right_is_one=True)
        case ReasoningGymReward():
            return _contrast_finding(config, scorer, samples, right_is_one=False)
        case HttpReward() | JudgeReward() if needs_answer(config):
            return _contrast_finding(config, scorer, samples, right_is_one=False)
        case PythonReward() | HttpReward() | JudgeReward():
            return _working_finding(config, scorer, samples)
        case RegexReward() | FormatReward() | JsonSchemaReward() | LengthPenaltyReward() | RepetitionPenaltyReward():
            return _known_finding(scorer, _known(config))


def _model_finding(scorer: Scorer, samples: list[Sample]) -> str | None:
    """What is right a model has learned; it must give numbers."""
    for result in _asked(scorer, samples):
        if isinstance(result, Unscored):
            return f"the model gives no number for a prompt: {result.reason}. Train it again, or name another source"
    return None


def _working_finding(config: RewardConfig, scorer: Scorer, samples: list[Sample]) -> str | None:
    results = _asked(scorer, [replace(sample, response=sample.answer or "") for sample in samples])
    for result in results:
        if isinstance(result, Unscored) and result.cause in FAULTS:
            return result.reason
    broken = [result for result in results if isinstance(result, Unscored) and result.cause != "none"]
    if not broken or len(broken) < len(results):
        return None
    remedy = "mend the service"
    if isinstance(config, PythonReward):
        remedy = "mend the function, or if it cannot be imported, install its package or put its folder on PYTHONPATH"
    return f"no row could be scored; {remedy}. The first row: {broken[0].reason}"


def _contrast_finding(config: RewardConfig, scorer: Scorer, samples: list[Sample], *, right_is_one: bool) -> str | None:
    answered = [sample for sample in samples if sample.answer is not None]
    if not answered:
        # reasoning-gym has data sets that are judged by metadata alone
        return "needs rows with a reference answer; set data.train[].label_key" if needs_answer(config) else None
    right = [replace(sample, response=_right(config, str(sample.answer))) for sample in answered]
    wrong = [replace(sample, response=_wrong(config, str(sample.answer))) for sample in answered]
    results = _asked(scorer, [*right, *wrong])
    pairs = list(zip(results[: len(right)], results[len(right) :], strict=True))
    if any(_tells(one, other, right_is_one) for one, other in pairs):
        return None
    wanted = "1 and 0" if right_is_one else "more for the right one"
    return (
        f"the answer {answered[0].answer!r} as the response got {_shown(pairs[0][0])}, a wrong response "
        f"{_shown(pairs[0][1])}; wanted {wanted}. Check that the data's answers have the form that this kind reads"
        f"{', or set needs_answer: false if it compares with none' if isinstance(config, HttpReward) else ''}"
    )


def _asked(scorer: Scorer, samples: list[Sample]) -> list[Score]:
    results = scorer.score(samples)
    silent = [result for result in results if isinstance(result, Unscored) and result.cause == "unreachable"]
    if silent and len(silent) == len(results):
        raise TransientError(
            f"A reward service cannot be reached: {silent[0].reason}.",
            remedy="Start it, or correct its address; then resume the run.",
            role="reward",
        )
    return results


def _known_finding(scorer: Scorer, known: Known) -> str | None:
    results = scorer.score([sample for sample, _ in known])
    for (sample, expected), found in zip(known, results, strict=True):
        if isinstance(found, Unscored) or (expected is not None and found != expected):
            wanted = "a score" if expected is None else f"{expected:g}"
            return f"the response {sample.response!r} got {_shown(found)}; wanted {wanted}"
    return None


def _known(
    config: RegexReward | FormatReward | JsonSchemaReward | LengthPenaltyReward | RepetitionPenaltyReward,
) -> Known:
    """Responses whose scores follow from the options alone."""
    match config:
        case RegexReward():
            return [(Sample("", ""), None)]
        case FormatReward():
            return [(Sample("", "\n".join(f"<{tag}>x</{tag}>" for tag in config.tags)), 1.0), (Sample("", ""), 0.0)]
        case JsonSchemaReward():
            examples = config.definition.get("examples", [])
            fitting = [(Sample("", json.dumps(example)), 1.0) for example in examples]
            return [(Sample("", ""), 0.0), (Sample("", "null"), None), *fitting]
        case LengthPenaltyReward():
            most = config.max_tokens
            return [(Sample("", ""), 0.0), (Sample("", "", response_tokens=most), -1.0)]
        case RepetitionPenaltyReward():
            twice = " ".join(["x"] * (config.ngram + 1)) if config.unit == "words" else "x" * (config.ngram + 1)
            return [(Sample("", ""), 0.0), (Sample("", twice), -0.5)]


def _tells(right: Score, wrong: Score, right_is_one: bool) -> bool:
    if isinstance(right, Unscored) or isinstance(wrong, Unscored):
        return False
    return (right, wrong) == (1.0, 0.0) if right_is_one else right > wrong


def _shown(score: Score) -> str:
    return f"no score ({score.reason})" if isinstance(score, Unscored) else f"{score:g}"


def _right(config: RewardConfig, answer: str) -> str:
    return delimited(answer) if isinstance(config, MathReward) else answer


def _wrong(config: RewardConfig, answer: str) -> str:
    match config:
        case NumberReward():
            return str((last_number(answer) or Decimal(0)) + 1 + 2 * Decimal(repr(config.tolerance)))
        case MathReward():
            return "\\boxed{-987654321/7}"
        case ChoiceReward():
            return next(letter for letter in config.choices if letter != last_choice(answer, config.choices))
        case ReasoningGymReward():
            return ""
        case HttpReward() | JudgeReward():
            return "I do not know."
        case _:
            return f"{answer} and more"
