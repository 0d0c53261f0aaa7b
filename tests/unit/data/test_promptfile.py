"""Prepared prompts come back from Parquet as they went in."""

import pytest

from engine.data.prepare import Prompt
from engine.data.promptfile import load_prompts, save_prompts
from engine.errors import StoreError

PROMPTS = [
    Prompt(
        0, (1, 5, 6), "2+2?\n\u2028\U0001f600", "4", "gsm8k", {"a": [1, 2.5, None, {"b": "ü"}]}, "rows.jsonl", 3, "k0"
    ),
    Prompt(1, (1,), "", None, "", {}, "rows.jsonl", 4, "k1"),
    Prompt(2, (2**40,), "x", "", "", {"a": 0.1, "big": 2**70}, "other.csv", 1, "k2"),
]


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[1:2], []])
def test_round_trip(tmp_path, prompts):
    save_prompts(prompts, tmp_path / "prompts.parquet")
    assert load_prompts(tmp_path / "prompts.parquet") == prompts


def test_the_same_prompts_give_the_same_bytes(tmp_path):
    for name in "ab":
        save_prompts(PROMPTS, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "prompts.parquet"
    save_prompts(PROMPTS, path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(StoreError, match=r"prompts\.parquet"):
        load_prompts(path)
    with pytest.raises(StoreError):
        load_prompts(tmp_path / "absent.parquet")
