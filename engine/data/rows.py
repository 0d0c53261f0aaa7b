"""What the readers hand on: rows with the line each came from, and the lines that hold none."""

from dataclasses import dataclass, field
from typing import Any

from engine.data.fingerprint import row_digest


@dataclass(frozen=True)
class RawRow:
    """The named values of one row as they were read.

    line: physical line of a text file (of a row that spans several, the first), else the row number; both from 1.
    """

    line: int
    values: dict[str, Any]
    digest: str


@dataclass(frozen=True)
class LineProblem:
    """Why one line gives no usable row; never holds the line's content."""

    line: int
    reason: str


@dataclass
class Reading:
    """What a source held: its rows, and the lines that hold none."""

    rows: list[RawRow] = field(default_factory=list)
    problems: list[LineProblem] = field(default_factory=list)
    ignored_columns: list[str] = field(default_factory=list)  # binary columns, which no prompt or scorer can use

    def add(self, line: int, values: dict[str, Any]) -> None:
        """Take one row, or note why its values cannot be kept (a lone surrogate, a number no float can hold)."""
        try:
            digest = row_digest(values)
        except (ValueError, TypeError) as error:
            self.reject(line, f"holds a value that JSON cannot hold ({_cause(error)})")
            return
        self.rows.append(RawRow(line, values, digest))

    def reject(self, line: int, reason: str) -> None:
        """Note one line that gives no row."""
        self.problems.append(LineProblem(line, reason))


def _cause(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return "text with half of a surrogate pair"
    if isinstance(error, TypeError):
        return "a type other than text, number, boolean, list and object"
    return "a number that is not finite"
