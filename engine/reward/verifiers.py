"""Verifiers for scorer processes: each factory imports its library there and returns the function for one sample.

A verifier may raise, hang or use up memory; engine/reward/isolation.py bounds it.
"""

import difflib
import importlib
import json
import logging
import re
from collections.abc import Callable
from typing import Any

from engine.reward.rules import last_number
from engine.reward.scorer import Sample

Verifier = Callable[[Sample], object]
_JSON_BLOCK = re.compile(r"```json[ \t]*\n(.*?)```", re.DOTALL)
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def math_verifier() -> Verifier:
    """1 where math-verify finds response and answer equal, else 0.

    The answer may be bare (`1/3`, `x+1`) or delimited (`$x+1$`); in a response, plain numbers and fractions are found
    anywhere, other expressions only inside `$...$` or `\\boxed{...}`. The library's own timeouts use SIGALRM, which
    works only in a main thread: they are off, the process is killed instead.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off

    def score(sample: Sample) -> object:
        if sample.answer is None:
            raise ValueError("the row has no reference answer")
        gold = parse(delimited(sample.answer), parsing_timeout=None, raise_on_error=True)
        if not gold:
            raise ValueError(f"math-verify cannot read the answer {sample.answer!r}")
        response = parse(sample.response, parsing_timeout=None)
        return float(verify(gold, response, timeout_seconds=None))

    return score


def delimited(answer: str) -> str:
    """The answer in the form in which math-verify reads any expression."""
    return answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}"


def regex_verifier(pattern: str) -> Verifier:
    """1 where the pattern is found anywhere in the response, else 0. Backtracking may take for ever: hence isolated."""
    compiled = re.compile(pattern)

    def score(sample: Sample) -> object:
        return float(compiled.search(sample.response) is not None)

    return score


def json_schema_verifier(definition: dict[str, Any], fenced: bool) -> Verifier:
    """1 where the response is JSON that the schema accepts, else 0.

    fenced: in a response with a ```json block, the last such block counts. Only references within the schema are
    followed. Patterns in a schema may backtrack for ever: hence isolated.
    """
    from jsonschema.validators import validator_for
    from referencing import Registry

    validator = validator_for(definition)(definition, registry=Registry())

    def score(sample: Sample) -> object:
        blocks = _JSON_BLOCK.findall(sample.response) if fenced else []
        try:
            value = json.loads(blocks[-1] if blocks else sample.response, parse_constant=_no_json)
        except (ValueError, RecursionError):  # the second: thousands of opening brackets
            return 0.0
        return float(validator.is_valid(value))

    return score


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def reading_verifier(pattern: str) -> Verifier:
    """The number in the group of the pattern's last match in the response; None where there is none."""
    compiled = re.compile(pattern)

    def score(sample: Sample) -> object:
        found = [match[1] for match in compiled.finditer(sample.response)]
        return float(found[-1]) if found else None

    return score


def reasoning_gym_verifier(dataset: str) -> Verifier:
    """The score, in [0, 1], that reasoning-gym's own verifier of the data set gives.

    Its entry is made of the row: answer; question from `extra["question"]` or the prompt; metadata from
    `extra["metadata"]` or `extra["extra_info"]["metadata"]`, as a dict or as JSON text, {} where the row has none.
    Judged is the text inside the last <answer></answer>; without one, the stripped response and its last number, and
    the better score counts. Some verifiers, chain_sum's too, give part of the score to a text that contains the answer.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS:
        close = difflib.get_close_matches(dataset, DATASETS) or sorted(DATASETS)
        raise ValueError(f"reasoning-gym has no data set {dataset!r}; there are {', '.join(close)}")
    judge = reasoning_gym.get_score_answer_fn(dataset)

    def score(sample: Sample) -> object:
        entry = _entry(sample)
        return max(float(judge(answer, entry)) for answer in _candidates(sample.response))

    return score


def _entry(sample: Sample) -> dict[str, Any]:
    extra = sample.extra
    holder = extra if "metadata" in extra else extra.get("extra_info") or {}
    metadata = holder.get("metadata", {})
    if isinstance(metadata, str):
        metadata = json.loads(metadata)
    return {"question": extra.get("question", sample.prompt), "answer": sample.answer, "metadata": metadata}


def _candidates(response: str) -> list[str]:
    if tagged := _TAGGED.findall(response):
        return [tagged[-1].strip()]
    found = last_number(response)
    return [response.strip()] if found is None else [response.strip(), str(found)]


def function_verifier(path: str) -> Verifier:
    """A user's function, called once per sample as function(prompt=..., response=..., answer=..., extra=...).

    path: `package.module:function`, importable in the scorer process (installed, or its folder on PYTHONPATH).
    """
    module, _, name = path.partition(":")
    function = getattr(importlib.import_module(module), name)

    def score(sample: Sample) -> object:
        return function(prompt=sample.prompt, response=sample.response, answer=sample.answer, extra=sample.extra)

    return score
