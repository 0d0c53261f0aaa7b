"""Looks at data without training on it; problems are reported, not raised."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import DataConfig, DataSource, SuiteConfig
from engine.data.prepare import examine, load_split
from engine.data.report import DataReport
from engine.data.schema import Content, Shape, lacks_preference, lacks_prompt, preference_row, prompt_row
from engine.errors import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class DataCheck:
    """The outcome of a check; `problems` is what a run would refuse to start with."""

    report: DataReport
    problems: list[Problem]

    @property
    def ok(self) -> bool:
        """Whether a run would accept the data."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Plain values: the report's keys, `ok`, and `errors` as {key, value, remedy}."""
        errors = [{"key": item.key, "value": item.value, "remedy": item.remedy} for item in self.problems]
        return {"ok": self.ok, **self.report.to_json(), "errors": errors}


def check_data(
    data: DataConfig,
    tokenizer: "PreTrainedTokenizerBase | None",
    *,
    needs_answer: bool,
    seed: int,
    suites: Sequence[SuiteConfig] = (),
) -> DataCheck:
    """What `prepare` would find; without a tokenizer, token counts are null and limits are not checked."""
    prepared, problems = examine(data, tokenizer, needs_answer=needs_answer, seed=seed, suites=suites)
    return DataCheck(prepared.report, problems)


def check_file(path: str | Path) -> DataCheck:
    """What one file, folder or Hub data set holds, as prompts or as preferences; needs neither tokenizer nor config."""
    data = DataConfig(train=(DataSource(path=str(path)),))
    split = load_split(data.train, data, None, "data.train", _ANY)
    split.require_rows()
    return DataCheck(split.report, split.problems)


def _any_row(values: dict[str, Any], source: DataSource) -> Content:
    if {"chosen", "rejected"} <= values.keys():
        return preference_row(values, source)
    return prompt_row(values, source)


def _lacks_any(columns: Set[str], source: DataSource) -> dict[str, str]:
    if {"chosen", "rejected"} <= columns:
        return lacks_preference(columns, source)
    return lacks_prompt(columns, source)


_ANY = Shape(_any_row, _lacks_any)
