"""Supervised examples on disk, as exact ids."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from engine.data.completions import Example


def save_examples(examples: Sequence[Example], path: Path) -> None:
    """Write examples as Parquet; `load_examples` gives them back unchanged."""
    columns = {
        "input_ids": [list(example.input_ids) for example in examples],
        "prompt_length": [example.prompt_length for example in examples],
    }
    pq.write_table(pa.table(columns), path)


def load_examples(path: Path) -> list[Example]:
    """The examples that `save_examples` wrote."""
    table = pq.read_table(path).to_pydict()
    return [Example(tuple(ids), length) for ids, length in zip(table["input_ids"], table["prompt_length"], strict=True)]
