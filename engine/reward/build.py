"""From one entry of `reward` to the scorer that serves it."""

import os
import re
from functools import partial
from typing import assert_never

from engine.config import (
    ExactMatchReward,
    MathReward,
    NumberReward,
    PythonReward,
    ReasoningGymReward,
    RegexReward,
    RewardConfig,
)
from engine.reward import rules, verifiers
from engine.reward.scorer import Scorer

# A huge power in a response would otherwise take the memory of the trainer beside it.
_VERIFIER_MEMORY = 4 * 2**30


def build_scorer(config: RewardConfig) -> Scorer:
    """The scorer of one component; scorer processes start with its first call."""
    match config:
        case ExactMatchReward():
            return rules.RuleScorer(partial(rules.exact_match, ignore_case=config.ignore_case))
        case NumberReward():
            return rules.RuleScorer(partial(rules.number, tolerance=config.tolerance))
        case RegexReward():
            return rules.RuleScorer(partial(rules.regex, pattern=re.compile(config.pattern)))
        case MathReward() | ReasoningGymReward() | PythonReward():
            return _isolated(config)
        case _:
            assert_never(config)


def _isolated(config: MathReward | ReasoningGymReward | PythonReward) -> Scorer:
    from engine.reward.isolation import IsolatedScorer

    memory: int | None = _VERIFIER_MEMORY
    match config:
        case MathReward():
            name, factory, workers = "math", verifiers.math_verifier, _library_workers()
        case ReasoningGymReward():
            name, workers = f"reasoning_gym {config.dataset}", _library_workers()
            factory = partial(verifiers.reasoning_gym_verifier, config.dataset)
        case PythonReward():
            name, workers, memory = config.function, config.workers, None  # it may well load a model
            factory = partial(verifiers.function_verifier, config.function)
    return IsolatedScorer(name, factory, timeout_s=config.timeout_s, workers=workers, memory_bytes=memory)


def _library_workers() -> int:
    """Two, so that one hung sample does not hold up the others; up to eight on larger machines."""
    return min(8, max(2, len(os.sched_getaffinity(0)) // 2))
