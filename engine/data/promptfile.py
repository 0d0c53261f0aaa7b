"""Prepared prompts as a Parquet file, read back exactly."""

import json
from collections.abc import Sequence
from pathlib import Path

from engine.data.prepare import Prompt
from engine.errors import StoreError


def save_prompts(prompts: Sequence[Prompt], path: Path) -> None:
    """Write prompts in order; `extra` as JSON, so that no column type depends on the rows."""
    import pyarrow
    from pyarrow import parquet

    schema = pyarrow.schema(
        {
            "index": pyarrow.int64(),
            "input_ids": pyarrow.list_(pyarrow.int64()),
            "text": pyarrow.large_string(),
            "answer": pyarrow.large_string(),
            "source": pyarrow.string(),
            "extra": pyarrow.large_string(),
            "file": pyarrow.string(),
            "line": pyarrow.int64(),
            "key": pyarrow.string(),
        }
    )
    rows = [vars(prompt) | {"extra": json.dumps(prompt.extra, allow_nan=False)} for prompt in prompts]
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), path)


def load_prompts(path: Path) -> list[Prompt]:
    """The prompts as they were saved. Raises StoreError if the file is not readable."""
    import pyarrow
    from pyarrow import parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise StoreError(f"the prepared prompts cannot be read: {error}", path=path) from error
    return [Prompt(**row | {"input_ids": tuple(row["input_ids"]), "extra": json.loads(row["extra"])}) for row in rows]
