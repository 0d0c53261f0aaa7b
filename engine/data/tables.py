"""Reads Arrow tables: Parquet files, folders written by save_to_disk, data sets of the Hub. Lines are row numbers."""

import datetime
import decimal
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import DataSource
from engine.data.rows import Reading
from engine.errors import DataError, TransientError

if TYPE_CHECKING:
    import datasets
    import pyarrow

_BATCH = 1000  # rows turned into Python values at a time


def read_parquet(path: Path) -> Reading:
    """All rows of one Parquet file."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            reading = Reading(ignored_columns=_binary_columns(file.schema_arrow))
            for batch in file.iter_batches(batch_size=_BATCH):
                _add_batch(reading, batch)
            return reading
    except pyarrow.ArrowException as error:
        raise DataError(f"the file is not readable Parquet: {error}") from error
    except OSError as error:
        raise DataError(f"the file cannot be read: {error}") from error


def _add_batch(reading: Reading, batch: "pyarrow.RecordBatch") -> None:
    used = batch.drop_columns(reading.ignored_columns)
    for values in used.to_pylist():
        row = {field.name: _decoded(values[field.name], field.type) for field in used.schema}
        reading.add(len(reading.rows) + len(reading.problems) + 1, _plain(row))


def read_disk(path: Path, split: str) -> Reading:
    """All rows of a folder written by `save_to_disk`; `split` chooses from a DatasetDict."""
    import datasets
    import pyarrow

    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        raise DataError(f"the folder is not a readable saved data set: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DataError(f"there is no split `{split}`, found: {', '.join(loaded)}", remedy="Set `split`.")
        loaded = loaded[split]
    return _read_dataset(loaded)


def read_hub(source: DataSource) -> Reading:
    """All rows of one split of a Hub data set. Raises TransientError where the Hub does not answer."""
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    try:
        loaded = datasets.load_dataset(source.path, name=source.subset, split=source.split)
    except (DatasetNotFoundError, ValueError) as error:
        raise DataError(f"neither a local path nor a readable Hub data set: {error}") from error
    except OSError as error:
        raise TransientError(
            f"{source.path} is no local path, and the Hub did not answer: {error}",
            remedy="Correct the path, or try again when the Hub can be reached.",
        ) from error
    return _read_dataset(loaded)


def _read_dataset(loaded: "datasets.Dataset") -> Reading:
    # As Python values, not as Arrow: `datasets` keeps columns of mixed type as JSON text and decodes them itself.
    ignored = _binary_columns(loaded.features.arrow_schema)
    reading = Reading(ignored_columns=ignored)
    for number, values in enumerate(loaded.remove_columns(ignored).with_format(None), start=1):
        reading.add(number, _plain(values))
    return reading


def _binary_columns(schema: "pyarrow.Schema") -> list[str]:
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise DataError(f"the table names a column twice: {', '.join(twice)}")
    return [field.name for field in schema if _is_binary(field.type)]


def _is_binary(kind: "pyarrow.DataType") -> bool:
    from pyarrow import types

    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return True
    return any(_is_binary(kind.field(index).type) for index in range(kind.num_fields))


def _decoded(value: Any, kind: "pyarrow.DataType") -> Any:
    """The value with its JSON parts parsed; `datasets` writes columns of mixed type as JSON text."""
    import pyarrow

    if value is None or "arrow.json" not in str(kind):
        return value
    if isinstance(kind, pyarrow.JsonType):
        return json.loads(value)
    if pyarrow.types.is_struct(kind):
        return {field.name: _decoded(value[field.name], field.type) for field in kind.fields}
    return [_decoded(item, kind.value_type) for item in value]


def _plain(value: Any) -> Any:
    """The JSON form of one Arrow value. pandas writes a missing number as NaN, for which JSON has only null."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value
