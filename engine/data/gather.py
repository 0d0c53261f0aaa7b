"""Turns configured sources into one split of recognised rows, and keeps account of every line that is not used."""

from dataclasses import dataclass, field

from engine.config import DataConfig, DataSource
from engine.data.fingerprint import rows_fingerprint
from engine.data.report import SHOWN, DataReport, FileReport, column_types, join_columns, line_problems
from engine.data.rows import LineProblem, RawRow
from engine.data.schema import BadRow, Content, Shape, content_key
from engine.data.sources import read_source
from engine.errors import DataError, Problem


@dataclass(frozen=True)
class Row:
    """One recognised row on its way through the filters; text and ids are empty until it is encoded."""

    origin: int  # index of its source
    file: str
    line: int
    digest: str
    content: Content
    key: str  # equal for rows with the same prompt but for case and spaces
    text: str = ""
    ids: tuple[int, ...] = ()
    targets: tuple[tuple[int, ...], ...] = ()  # ids of the completions

    @property
    def place(self) -> str:
        """FILE:LINE"""
        return f"{self.file}:{self.line}"


@dataclass
class Split:
    """All rows of one list of sources, with the report about them and what the user must fix.

    key: the configuration key of the sources. bad: per source, lines that are unreadable or not of the declared shape.
    """

    key: str
    report: DataReport = field(default_factory=DataReport)
    rows: list[Row] = field(default_factory=list)
    bad: list[list[LineProblem]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    fingerprint: str = ""

    def reject(self, row: Row, reason: str) -> None:
        """Count a row among the bad lines."""
        self.bad[row.origin].append(LineProblem(row.line, reason))

    def drop(self, row: Row, reason: str) -> None:
        """Note a row that a filter leaves out."""
        self.report.files[row.origin].drop(row.line, reason)

    def require_rows(self) -> None:
        """Add a problem if nothing is left and no other problem explains it."""
        if not self.rows and not self.problems:
            read = sum(file.rows for file in self.report.files)
            self.problems.append(Problem(self.key, f"{read} rows read", "no row is left; relax the filters"))


def gather(sources: tuple[DataSource, ...], key: str, shape: Shape) -> Split:
    """Read all sources; what is wrong with one never hides what is wrong with the next."""
    split = Split(key)
    digests: list[str] = []
    for origin, source in enumerate(sources):
        report = FileReport(source.path)
        split.report.files.append(report)
        split.bad.append([])
        try:
            reading = read_source(source)
        except DataError as error:
            reason = f"{error.message}. {error.remedy}".rstrip(". ")
            split.problems.append(Problem(f"{key}[{origin}].path", source.path, reason))
            continue
        report.rows = len(reading.rows) + len(reading.problems)
        report.fingerprint = rows_fingerprint(row.digest for row in reading.rows)
        digests += [row.digest for row in reading.rows]
        columns = column_types(reading.rows, reading.ignored_columns)
        split.report.columns = join_columns(split.report.columns, columns)
        split.bad[origin] += reading.problems
        _recognise(split, origin, source, reading.rows, shape)
    split.fingerprint = rows_fingerprint(digests)
    return split


def _recognise(split: Split, origin: int, source: DataSource, rows: list[RawRow], shape: Shape) -> None:
    columns = {name for row in rows for name in row.values}
    missing = shape.missing(columns, source) if rows else {}
    for option, what in missing.items():
        found = ", ".join(sorted(columns)) or "none"
        remedy = f"{source.path} has {what}; columns found: {found}. Name the right one, or correct the file"
        split.problems.append(Problem(f"{split.key}[{origin}].{option}", _option(source, option), remedy))
    if missing:
        return
    for raw in rows:
        try:
            content = shape.parse(raw.values, source)
        except BadRow as error:
            split.bad[origin].append(LineProblem(raw.line, str(error)))
            continue
        row = Row(origin, source.path, raw.line, raw.digest, content, content_key(content.prompt))
        split.rows.append(row)


def _option(source: DataSource, option: str) -> str | None:
    value: str | None = source.model_dump()[option]
    return value


def settle_bad_lines(split: Split, data: DataConfig) -> None:
    """Apply `data.bad_lines`: every bad line is an error, or is left out as long as there are few."""
    for origin, report in enumerate(split.report.files):
        bad = sorted(split.bad[origin], key=lambda item: item.line)
        report.bad_lines = len(bad)
        report.problems += bad
        if not bad:
            continue
        if data.bad_lines == "error":
            remedy = "correct them, or set data.bad_lines: skip"
            split.problems += line_problems(f"{split.key}[{origin}]", report.path, bad, remedy)
        elif len(bad) > data.max_bad_share * report.rows:
            shown = ", ".join(str(item.line) for item in bad[:SHOWN])
            remedy = f"more than data.max_bad_share = {data.max_bad_share} allows (lines {shown}); correct the file"
            value = f"{report.path}, {len(bad)} bad lines of {report.rows}"
            split.problems.append(Problem(f"{split.key}[{origin}]", value, remedy))
