"""Does a component tell a right answer from a wrong one? Asked at the start, through the path that training uses."""

from dataclasses import replace
from decimal import Decimal

from engine.config import (
    ExactMatchReward,
    MathReward,
    NumberReward,
    PythonReward,
    ReasoningGymReward,
    RegexReward,
    RewardConfig,
)
from engine.reward.rules import last_number
from engine.reward.scorer import Sample, Score, Scorer, Unscored
from engine.reward.verifiers import delimited


def canary_finding(config: RewardConfig, scorer: Scorer, samples: list[Sample]) -> str | None:
    """What is wrong with the component and what to do about it; None if it works.

    One good row is enough, so that a single odd answer does not stop a run. A regex has no answer and is not asked. A
    function is asked only to score: what is right is its own business.
    """
    match config:
        case RegexReward():
            return None
        case PythonReward():
            return _function_finding(scorer, samples)
        case ReasoningGymReward():
            return _contrast_finding(config, scorer, samples, right_is_one=False)
        case ExactMatchReward() | NumberReward() | MathReward():
            return _contrast_finding(config, scorer, samples, right_is_one=True)


def _function_finding(scorer: Scorer, samples: list[Sample]) -> str | None:
    results = scorer.score([replace(sample, response=sample.answer or "") for sample in samples])
    for result in results:
        if isinstance(result, Unscored) and result.cause == "type":
            return result.reason
    broken = [result for result in results if isinstance(result, Unscored) and result.cause != "none"]
    if broken and len(broken) == len(results):
        return (
            "no row could be scored; mend the function, or if it cannot be imported, install its package or put its "
            f"folder on PYTHONPATH. The first row: {broken[0].reason}"
        )
    return None


def _contrast_finding(config: RewardConfig, scorer: Scorer, samples: list[Sample], *, right_is_one: bool) -> str | None:
    answered = [sample for sample in samples if sample.answer is not None]
    if not answered:
        # reasoning-gym has data sets that are judged by metadata alone
        return "needs rows with a reference answer; set data.train[].label_key" if right_is_one else None
    right = scorer.score([replace(sample, response=_right(config, str(sample.answer))) for sample in answered])
    wrong = scorer.score([replace(sample, response=_wrong(config, str(sample.answer))) for sample in answered])
    if any(_tells(one, other, right_is_one) for one, other in zip(right, wrong, strict=True)):
        return None
    wanted = "1 and 0" if right_is_one else "more for the right one"
    return (
        f"the answer {answered[0].answer!r} as the response got {_shown(right[0])}, a wrong response "
        f"{_shown(wrong[0])}; wanted {wanted}. Check that the data's answers have the form that this kind reads"
    )


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
        case ReasoningGymReward():
            return ""
        case _:
            return f"{answer} and more"
