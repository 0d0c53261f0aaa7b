"""Parquet files, folders written by save_to_disk, and the Hub when it is not there."""

import datetime
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from engine.config import DataSource
from engine.data.sources import read_source
from engine.data.tables import read_disk, read_parquet
from engine.errors import DataError, TransientError

datasets = pytest.importorskip("datasets")


def values(path: Path) -> list[dict]:
    return [row.values for row in read_parquet(path).rows]


def write(path: Path, **columns: object) -> Path:
    parquet.write_table(pyarrow.table(columns), path)
    return path


def test_parquet_rows_are_numbered_from_one(tmp_path):
    path = write(tmp_path / "a.parquet", prompt=["a", "b"], answer=[1, None])
    reading = read_parquet(path)
    assert [(row.line, row.values) for row in reading.rows] == [
        (1, {"prompt": "a", "answer": 1}),
        (2, {"prompt": "b", "answer": None}),
    ]


def test_row_numbers_go_on_over_batches(tmp_path):
    path = write(tmp_path / "a.parquet", n=list(range(2500)))
    rows = read_parquet(path).rows
    assert [row.line for row in rows] == list(range(1, 2501))
    assert rows[-1].values == {"n": 2499}


def test_arrow_values_become_json_values(tmp_path):
    path = write(
        tmp_path / "a.parquet",
        day=[datetime.date(2025, 1, 2)],
        missing=[float("nan")],
        mapping=pyarrow.array([[("a", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
        category=pyarrow.array(["x"]).dictionary_encode(),
    )
    assert values(path) == [{"day": "2025-01-02", "missing": None, "mapping": [["a", 1]], "category": "x"}]


def test_binary_columns_are_left_out_and_named(tmp_path):
    path = write(tmp_path / "a.parquet", prompt=["a"], image=[{"bytes": b"x", "path": "p"}], pages=[[b"x"]])
    reading = read_parquet(path)
    assert reading.rows[0].values == {"prompt": "a"}
    assert reading.ignored_columns == ["image", "pages"]


def test_infinity_is_a_bad_row_not_a_crash(tmp_path):
    reading = read_parquet(write(tmp_path / "a.parquet", answer=[1.0, float("inf")]))
    assert [row.line for row in reading.rows] == [1]
    assert [(item.line, "not finite" in item.reason) for item in reading.problems] == [(2, True)]


def test_columns_of_mixed_type_that_datasets_wrote_are_read_as_values(tmp_path):
    features = datasets.Features(
        {"answer": datasets.Json(), "turns": datasets.List({"role": datasets.Value("string"), "x": datasets.Json()})}
    )
    rows = {"answer": [4, "4a"], "turns": [[{"role": "user", "x": {"k": 1}}], [{"role": "user", "x": None}]]}
    mixed = datasets.Dataset.from_dict(rows, features=features)
    mixed.to_parquet(tmp_path / "mixed.parquet")
    mixed.save_to_disk(tmp_path / "mixed")
    expected = [dict(zip(rows, pair, strict=True)) for pair in zip(*rows.values(), strict=True)]
    assert values(tmp_path / "mixed.parquet") == expected
    assert [row.values for row in read_disk(tmp_path / "mixed", "train").rows] == expected


@pytest.mark.parametrize("content", [b"", b"PAR1 this is not Parquet PAR1"])
def test_a_file_that_is_not_parquet_is_refused(tmp_path, content):
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(DataError, match="Parquet"):
        read_parquet(tmp_path / "a.parquet")


def test_a_saved_data_set_is_read_in_its_own_order(tmp_path):
    saved = datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}])
    saved.select([2, 0]).save_to_disk(tmp_path / "saved")
    assert [row.values for row in read_disk(tmp_path / "saved", "train").rows] == [{"prompt": "c"}, {"prompt": "a"}]


def test_the_split_of_a_saved_dataset_dict_is_chosen(tmp_path):
    parts = {name: datasets.Dataset.from_list([{"prompt": name}]) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    reading = read_source(DataSource(path=str(tmp_path / "saved"), split="test"))
    assert [row.values for row in reading.rows] == [{"prompt": "test"}]
    with pytest.raises(DataError, match="no split `dev`, found: train, test"):
        read_disk(tmp_path / "saved", "dev")


def test_a_damaged_saved_data_set_is_refused(tmp_path):
    datasets.Dataset.from_list([{"prompt": "a"}]).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / "state.json").write_text("{")
    with pytest.raises(DataError, match="not a readable saved data set"):
        read_disk(tmp_path / "saved", "train")


def test_a_hub_that_does_not_answer_can_be_tried_again(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(TransientError, match="owner/data-set-that-is-not-cached is no local path") as caught:
        read_source(DataSource(path="owner/data-set-that-is-not-cached"))
    assert caught.value.retryable
