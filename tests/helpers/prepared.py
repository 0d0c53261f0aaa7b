"""Prepared prompts, or the one error that lists what is wrong with the data."""

from typing import Any

from engine.data.prepare import Prepared, examine, raise_problems


def prepare(data: Any, tokenizer: Any, **options: Any) -> Prepared:
    """As `examine`, with its problems raised."""
    prepared, problems = examine(data, tokenizer, **options)
    raise_problems(problems)
    return prepared
