"""Preference pairs on disk, as exact ids."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from engine.data.completions import Preference

_IDS = ("prompt_ids", "chosen_ids", "rejected_ids")


def save_pairs(pairs: Sequence[Preference], path: Path) -> None:
    """Write pairs as Parquet; `load_pairs` gives them back unchanged."""
    import pyarrow
    from pyarrow import parquet

    columns = {name: pyarrow.list_(pyarrow.int64()) for name in _IDS}
    labels = {"margin": pyarrow.float64(), "chosen_is_safe": pyarrow.bool_(), "rejected_is_safe": pyarrow.bool_()}
    table = pyarrow.Table.from_pylist([asdict(pair) for pair in pairs], schema=pyarrow.schema(columns | labels))
    parquet.write_table(table, path)


def load_pairs(path: Path) -> list[Preference]:
    """The pairs that `save_pairs` wrote."""
    from pyarrow import parquet

    rows = parquet.read_table(path).to_pylist()
    return [Preference(**row | {name: tuple(row[name]) for name in _IDS}) for row in rows]
