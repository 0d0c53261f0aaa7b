"""From one entry of `reward` to the scorer that serves it."""

import os
from functools import partial
from typing import assert_never

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
)
from engine.errors import ShapeError
from engine.reward import penalties, rules, verifiers
from engine.reward.scorer import Scorer

# A huge power in a response would otherwise take the memory of the trainer beside it.
_VERIFIER_MEMORY = 4 * 2**30
_READING_S = 5.0  # for the pattern that reads a judge's reply: one that backtracks for ever costs one sample


def build_scorer(config: RewardConfig) -> Scorer:
    """The scorer of one component; scorer processes start with its first call."""
    match config:
        case ExactMatchReward():
            return rules.RuleScorer(partial(rules.exact_match, ignore_case=config.ignore_case))
        case NumberReward():
            return rules.RuleScorer(partial(rules.number, tolerance=config.tolerance))
        case ChoiceReward():
            return rules.RuleScorer(partial(rules.choice, choices=config.choices))
        case FormatReward():
            return rules.RuleScorer(partial(rules.tagged, tags=config.tags))
        case LengthPenaltyReward():
            limits = partial(penalties.length_penalty, max_tokens=config.max_tokens, buffer_tokens=config.buffer_tokens)
            return rules.RuleScorer(limits)
        case RepetitionPenaltyReward():
            return rules.RuleScorer(partial(penalties.repetition_penalty, ngram=config.ngram, unit=config.unit))
        case MathReward() | RegexReward() | JsonSchemaReward() | ReasoningGymReward() | PythonReward():
            return _isolated(config)
        case HttpReward() | JudgeReward():
            return _remote(config)
        case ModelReward():
            raise ShapeError("A reward model is built by the worker that scores with it, and given to Reward.")
        case _:
            assert_never(config)


def _isolated(config: MathReward | RegexReward | JsonSchemaReward | ReasoningGymReward | PythonReward) -> Scorer:
    from engine.reward.isolation import IsolatedScorer

    name: str = config.kind
    workers = _library_workers()
    memory: int | None = _VERIFIER_MEMORY
    match config:
        case MathReward():
            factory = verifiers.math_verifier
        case RegexReward():
            factory = partial(verifiers.regex_verifier, config.pattern)
        case JsonSchemaReward():
            factory = partial(verifiers.json_schema_verifier, config.definition, config.fenced)
        case ReasoningGymReward():
            name = f"reasoning_gym {config.dataset}"
            factory = partial(verifiers.reasoning_gym_verifier, config.dataset)
        case PythonReward():
            name, workers, memory = config.function, config.workers, None  # it may well load a model
            factory = partial(verifiers.function_verifier, config.function)
    return IsolatedScorer(name, factory, timeout_s=config.timeout_s, workers=workers, memory_bytes=memory)


def _remote(config: HttpReward | JudgeReward) -> Scorer:
    from engine.reward.endpoint import Endpoint
    from engine.reward.isolation import IsolatedScorer
    from engine.reward.judge import JudgeScorer
    from engine.reward.remote import RemoteScorer

    url = config.url if isinstance(config, HttpReward) else f"{config.base_url.rstrip('/')}/chat/completions"
    endpoint = Endpoint(
        url,
        token_env=config.token_env,
        timeout_s=config.timeout_s,
        retries=config.retries,
        backoff_s=config.backoff_s,
    )
    if isinstance(config, HttpReward):
        return RemoteScorer(endpoint, batch_size=config.batch_size, concurrency=config.concurrency)
    reader = IsolatedScorer(
        "judge.pattern",
        partial(verifiers.reading_verifier, config.pattern),
        timeout_s=_READING_S,
        workers=1,
        memory_bytes=_VERIFIER_MEMORY,
    )
    return JudgeScorer(config, endpoint, reader)


def _library_workers() -> int:
    """Two, so that one hung sample does not hold up the others; up to eight on larger machines."""
    return min(8, max(2, len(os.sched_getaffinity(0)) // 2))
