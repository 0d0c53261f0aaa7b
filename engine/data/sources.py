"""Reads one configured source into rows with the line each came from; what a row means is the business of schema.py."""

import re
from pathlib import Path

from engine.config import DataSource
from engine.data import tables, textfiles
from engine.data.rows import Reading
from engine.errors import DataError

_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".parquet": "parquet"}
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst", ".zip", ".lz4"}
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")


def read_source(source: DataSource) -> Reading:
    """All rows of one file, folder or Hub data set.

    Raises DataError where nothing can be read at all; lines that are broken one by one are in `Reading.problems`.
    """
    path = Path(source.path).expanduser()
    match source_format(source):
        case "jsonl":
            return textfiles.read_jsonl(path)
        case "csv":
            return textfiles.read_csv(path)
        case "parquet":
            return tables.read_parquet(path)
        case "disk":
            return tables.read_disk(path, source.split)
        case _:
            return tables.read_hub(source)


def source_format(source: DataSource) -> str:
    """The format configured, else the one the path shows. Raises DataError if there is nothing there."""
    if source.format == "hub":
        return "hub"
    path = Path(source.path).expanduser()
    suffix = path.suffix.lower()
    if not path.exists():
        if source.format == "auto" and _looks_like_hub(source.path, suffix):
            return "hub"
        raise DataError("there is no such file or folder", remedy="Correct the path, or make the file first.")
    if suffix in _COMPRESSED:
        raise DataError("the file is compressed", remedy="Unpack it first.")
    if path.is_dir():
        return _folder_format(source)
    if source.format == "disk":
        raise DataError("format `disk` needs a folder written by save_to_disk, found a file")
    if source.format != "auto":
        return source.format
    if suffix not in _FORMATS:
        known = ", ".join(sorted(_FORMATS))
        raise DataError(f"the ending tells no format (known: {known})", remedy="Set `format` of this source.")
    return _FORMATS[suffix]


def _looks_like_hub(path: str, suffix: str) -> bool:
    return bool(_HUB_ID.match(path)) and suffix not in _FORMATS and suffix not in _COMPRESSED


def _folder_format(source: DataSource) -> str:
    if source.format not in ("auto", "disk"):
        raise DataError(f"format `{source.format}` needs a file, found a folder", remedy="Name one file per source.")
    path = Path(source.path).expanduser()
    if not (path / "state.json").exists() and not (path / "dataset_dict.json").exists():
        raise DataError(
            "the folder was not written by save_to_disk (no state.json, no dataset_dict.json)",
            remedy="Name its files one by one.",
        )
    return "disk"
