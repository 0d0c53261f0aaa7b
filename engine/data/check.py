"""Looks at data without training on it; problems are reported, not raised."""

from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import DataConfig, DataSource
from engine.data.preferences import helpful_row, is_pair, lacks_pair
from engine.data.prepare import load_split
from engine.data.report import DataReport
from engine.data.schema import Content, Shape, lacks_prompt, prompt_row
from engine.errors import Problem


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


def check_file(path: str | Path) -> DataCheck:
    """What one file, folder or Hub data set holds, as prompts or as preferences; needs neither tokenizer nor config."""
    data = DataConfig(train=(DataSource(path=str(path)),))
    split = load_split(data.train, data, None, "data.train", _ANY)
    split.require_rows()
    return DataCheck(split.report, split.problems)


def _any_row(values: dict[str, Any], source: DataSource) -> Content:
    if is_pair(values.keys()):
        return helpful_row(values, source)
    return prompt_row(values, source)


def _lacks_any(columns: Set[str], source: DataSource) -> dict[str, str]:
    if is_pair(columns):
        return lacks_pair(columns, source)
    return lacks_prompt(columns, source)


_ANY = Shape(_any_row, _lacks_any)
