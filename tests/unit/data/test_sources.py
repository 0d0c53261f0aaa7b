"""Which reader a source gets, and what is said where there is nothing to read."""

import pytest

from engine.config import DataSource
from engine.data.sources import source_format
from engine.errors import DataError


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a.jsonl", "jsonl"), ("a.ndjson", "jsonl"), ("a.json", "jsonl"), ("a.CSV", "csv"), ("a.parquet", "parquet")],
)
def test_the_ending_tells_the_format(tmp_path, name, expected):
    (tmp_path / name).write_bytes(b"")
    assert source_format(DataSource(path=str(tmp_path / name))) == expected


def test_a_configured_format_wins_over_the_ending(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"")
    assert source_format(DataSource(path=str(tmp_path / "a.txt"), format="jsonl")) == "jsonl"


@pytest.mark.parametrize("path", ["missing.jsonl", "data/train.jsonl", "./owner/name", "/no/such/folder", "rows"])
def test_a_path_that_is_not_there_is_a_missing_file(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="no such file or folder"):
        source_format(DataSource(path=path))


def test_owner_and_name_is_a_hub_data_set_unless_it_exists_locally(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert source_format(DataSource(path="owner/name")) == "hub"
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "owner" / "name" / "state.json").write_text("{}")
    assert source_format(DataSource(path="owner/name")) == "disk"
    assert source_format(DataSource(path="owner/name", format="hub")) == "hub"


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.zst", "a.zip"])
def test_compressed_files_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x1f\x8b")
    with pytest.raises(DataError, match=r"compressed.*Unpack"):
        source_format(DataSource(path=str(tmp_path / name)))


def test_an_unknown_ending_names_the_option(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"")
    with pytest.raises(DataError, match="Set `format`"):
        source_format(DataSource(path=str(tmp_path / "a.txt")))


def test_a_folder_that_is_no_saved_data_set_is_refused(tmp_path):
    with pytest.raises(DataError, match="save_to_disk"):
        source_format(DataSource(path=str(tmp_path)))
    with pytest.raises(DataError, match="needs a file, found a folder"):
        source_format(DataSource(path=str(tmp_path), format="jsonl"))


def test_disk_format_of_a_file_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"")
    with pytest.raises(DataError, match="needs a folder"):
        source_format(DataSource(path=str(tmp_path / "a.jsonl"), format="disk"))
