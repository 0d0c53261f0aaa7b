"""Reads JSON Lines and CSV with physical line numbers; a byte order mark, blank lines and \\r\\n change nothing."""

import codecs
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.data.rows import Reading
from engine.errors import DataError

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_jsonl(path: Path) -> Reading:
    """One JSON object per line; lines end at \\n only, since U+2028 and its like may stand inside a string."""
    reading = Reading()
    decoder = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    for number, raw in _physical_lines(path):
        if not raw.strip():
            continue
        if not reading.rows and raw.strip() == b"[":
            raise DataError("the file is one JSON array", remedy="Write one object per line (JSON Lines).")
        try:
            value = decoder.decode(_text(raw).strip())
        except (ValueError, RecursionError) as error:
            reading.reject(number, _json_reason(error))
            continue
        if isinstance(value, dict):
            reading.add(number, value)
        else:
            reading.reject(number, f"must be a JSON object, found {_json_type(value)}")
    return reading


def read_csv(path: Path) -> Reading:
    """Rows under a header line; every value is text, an empty cell too. Raises DataError for a bad header."""
    reading = Reading()
    lines = _CsvLines(path)
    rows = csv.reader(lines, strict=True)
    header: list[str] | None = None
    while True:
        start = lines.number + 1
        try:
            cells = next(rows)
        except StopIteration:
            return reading
        except csv.Error as error:
            if header is None:
                raise DataError(f"line {start}, the header, is not valid CSV: {error}") from error
            reading.reject(start, f"is not valid CSV: {error}")
            continue
        broken = lines.broken_from(start)
        if broken and header is None:
            raise DataError(f"line {start}, the header, {broken}")
        if len(cells) <= 1 and not "".join(cells).strip():
            continue
        if header is None:
            header = _header(cells)
        elif broken:
            reading.reject(start, broken)
        elif len(cells) != len(header):
            reading.reject(start, f"has {len(cells)} cells, the header has {len(header)}")
        else:
            reading.add(start, dict(zip(header, cells, strict=True)))


class _CsvLines:
    """The decoded lines of a CSV file, counted; lines that are no text are repaired and remembered as broken."""

    def __init__(self, path: Path) -> None:
        self.number = 0
        self._broken: dict[int, str] = {}
        self._lines = _physical_lines(path)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.number, raw = next(self._lines)
        try:
            return _text(raw)
        except ValueError as error:
            self._broken[self.number] = str(error)
            return raw.decode("utf-8", errors="replace")

    def broken_from(self, start: int) -> str | None:
        """Why the row that started at this line cannot be used, or None; forgets it."""
        reasons = [f"{reason} (line {number})" for number, reason in self._broken.items() if number >= start]
        self._broken.clear()
        return reasons[0] if reasons else None


def _header(cells: list[str]) -> list[str]:
    names = [cell.strip() for cell in cells]
    if "" in names:
        raise DataError(f"column {names.index('') + 1} of the CSV header has no name")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"the CSV header names a column twice: {', '.join(twice)}")
    return names


def _physical_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Line number (from 1) and bytes of every line, without the byte order mark. Raises DataError for UTF-16."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                yield number, _without_mark(raw) if number == 1 else raw
    except OSError as error:
        raise DataError(f"the file cannot be read: {error.strerror}") from error


def _without_mark(first_line: bytes) -> bytes:
    if first_line.startswith(_UTF16):
        raise DataError("the file is UTF-16", remedy="Save it as UTF-8.")
    return first_line.removeprefix(codecs.BOM_UTF8)


def _text(raw: bytes) -> str:
    if b"\0" in raw:
        raise ValueError("holds a NUL byte")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {error.start + 1} of the line)") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("names a key twice")
    return values


def _no_constant(name: str) -> None:
    raise ValueError(f"holds {name}, which is not JSON")


def _json_reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"is not valid JSON: {error.msg} at column {error.colno}"
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    if "integer string conversion" in str(error):
        return "holds a number of more digits than can be read"
    return str(error)


def _json_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
