"""What was found in the data: per file, per column, over all; the content of `hybridflow data check --json`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.data.rows import LineProblem, RawRow
from engine.errors import Problem

SHOWN = 20  # line problems spelled out in one error message; the report holds all


@dataclass
class FileReport:
    """One source: rows read, and every line that was not kept, with the reason."""

    path: str
    rows: int = 0  # lines that hold or should hold a row; blank lines do not count
    bad_lines: int = 0  # of them, unreadable or not of the declared shape
    problems: list[LineProblem] = field(default_factory=list)
    fingerprint: str = ""

    @property
    def kept(self) -> int:
        """Rows that are used."""
        return self.rows - len({problem.line for problem in self.problems})

    def drop(self, line: int, reason: str) -> None:
        """Note one row that is not used."""
        self.problems.append(LineProblem(line, reason))

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        problems = sorted(self.problems, key=lambda problem: problem.line)
        return {
            "path": self.path,
            "rows": self.rows,
            "kept": self.kept,
            "dropped": self.rows - self.kept,
            "bad_lines": self.bad_lines,
            "problems": [{"line": problem.line, "reason": problem.reason} for problem in problems],
            "fingerprint": self.fingerprint,
        }


@dataclass(frozen=True)
class Overlap:
    """One training row that is also an evaluation row, each as FILE:LINE."""

    train: str
    eval: str


@dataclass
class DataReport:
    """What `data check` prints and the data card keeps.

    columns: name -> types seen. duplicates: rows that repeat an earlier one of their split, kept or not.
    prompt_lengths: tokens of every templated prompt before any limit; empty where no tokenizer was at hand.
    """

    files: list[FileReport] = field(default_factory=list)
    columns: dict[str, str] = field(default_factory=dict)
    duplicates: int = 0
    overlap: list[Overlap] = field(default_factory=list)
    prompt_lengths: list[int] = field(default_factory=list)
    truncated: int = 0  # completions cut at the token limit
    without_labels: int = 0  # rows dropped because nothing of a completion was left below the token limit
    identical: int = 0  # pairs dropped because both completions are the same below the token limit

    def to_json(self) -> dict[str, Any]:
        """The report as plain values, ready for json.dumps."""
        return {
            "files": [file.to_json() for file in self.files],
            "columns": self.columns,
            "duplicates": self.duplicates,
            "overlap": [{"train": pair.train, "eval": pair.eval} for pair in self.overlap],
            "prompt_tokens": _quantiles(self.prompt_lengths),
            "truncated": self.truncated,
            "without_labels": self.without_labels,
            "identical": self.identical,
        }


def merged(reports: Iterable[DataReport]) -> DataReport:
    """One report of several splits."""
    total = DataReport()
    for report in reports:
        total.files += report.files
        total.columns = join_columns(total.columns, report.columns)
        total.duplicates += report.duplicates
        total.overlap += report.overlap
        total.prompt_lengths += report.prompt_lengths
        total.truncated += report.truncated
        total.without_labels += report.without_labels
        total.identical += report.identical
    return total


def column_types(rows: Sequence[RawRow], ignored: Iterable[str]) -> dict[str, str]:
    """Name -> types seen in a file, such as `string | null`; `absent` where some rows lack the column."""
    seen: dict[str, set[str]] = {}
    counts: dict[str, int] = {}
    for row in rows:
        for name, value in row.values.items():
            seen.setdefault(name, set()).add(_type(value))
            counts[name] = counts.get(name, 0) + 1
    for name, count in counts.items():
        if count < len(rows):
            seen[name].add("absent")
    found = {name: " | ".join(sorted(types, key=_TYPES.index)) for name, types in seen.items()}
    return found | {name: "binary (ignored)" for name in ignored}


def join_columns(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """The columns of two files together."""
    joined = dict(one)
    for name, types in other.items():
        parts = {*joined.get(name, types).split(" | "), *types.split(" | ")}
        joined[name] = " | ".join(sorted(parts, key=_TYPES.index))
    return joined


def line_problems(key: str, path: str, lines: Sequence[LineProblem], remedy: str) -> list[Problem]:
    """The first lines one by one, then how many there are in all."""
    found = [Problem(key, f"{path}, line {item.line}", item.reason) for item in lines[:SHOWN]]
    return [*found, Problem(key, f"{path}, {len(lines)} such lines in all", remedy)]


_TYPES = ["string", "number", "boolean", "list", "object", "binary (ignored)", "null", "absent"]


def _type(value: Any) -> str:
    names = {str: "string", bool: "boolean", list: "list", dict: "object", type(None): "null"}
    return names.get(type(value), "number")


def _quantiles(lengths: Sequence[int]) -> dict[str, int | None]:
    """Smallest, median, 95th percentile (nearest rank) and largest."""
    if not lengths:
        return {"min": None, "p50": None, "p95": None, "max": None}
    ordered = sorted(lengths)
    ranks = {"p50": -(-len(ordered) * 50 // 100), "p95": -(-len(ordered) * 95 // 100)}
    return {"min": ordered[0], **{name: ordered[rank - 1] for name, rank in ranks.items()}, "max": ordered[-1]}
