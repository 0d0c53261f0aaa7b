"""Rows of a run on fixed rows: held out, cut, counted; with the ids that every other stage has for the same text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.data.completions import Example, Preference
from engine.data.offline import examine_offline
from engine.data.pairfile import load_pairs, save_pairs
from engine.data.templating import PromptEncoder
from engine.offlineconfig import OfflineConfig
from tests.helpers.tokenizers import TURNS_WITH_BOS, char_tokenizer

TOKENIZER = char_tokenizer(template=TURNS_WITH_BOS)
BOS, EOS = TOKENIZER.bos_token_id, TOKENIZER.eos_token_id
USER, ASSISTANT = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
PAIRS = [{"prompt": f"{index}+1=", "chosen": str(index + 1), "rejected": "no"} for index in range(20)]


@pytest.fixture
def config(jsonl: Callable[..., str]) -> Callable[..., OfflineConfig]:
    """A run on rows, and on other rows held out where they are given."""

    def make(objective: str, rows: list[Any], held_out: list[Any] | None = None, **options: Any) -> OfflineConfig:
        data: dict[str, Any] = {"train": [{"path": jsonl("train.jsonl", rows)}], "max_prompt_tokens": 60}
        if held_out is not None:
            data["eval"] = [{"path": jsonl("eval.jsonl", held_out)}]
        content = {"name": "x", "model": {"source": "m"}, "objective": {"name": objective}, "steps": 1}
        return OfflineConfig.model_validate(content | {"data": data | {"eval_fraction": 0.2} | options})

    return make


def test_a_share_is_held_out_where_no_file_is(config: Callable[..., OfflineConfig]) -> None:
    rows, problems = examine_offline(config("reward_model", PAIRS), TOKENIZER)
    assert problems == []
    assert (len(rows.train), len(rows.eval)) == (16, 4)
    assert not {pair.prompt_ids for pair in rows.train} & {pair.prompt_ids for pair in rows.eval}


def test_pairs_begin_with_the_ids_that_rollout_gives_the_prompt(config: Callable[..., OfflineConfig]) -> None:
    turns = [{"role": "user", "content": "2+2="}]
    rows = [{"prompt": turns, "chosen": "4", "rejected": "5"}, *PAIRS]
    found, _ = examine_offline(config("dpo", rows, PAIRS[:2], overlap="drop"), TOKENIZER)
    encoder = PromptEncoder(TOKENIZER)
    pair = found.train[0]
    assert isinstance(pair, Preference)
    assert pair.prompt_ids == encoder.encode([encoder.render(turns)])[0]
    for side in (pair.chosen_ids, pair.rejected_ids):
        whole = pair.prompt_ids + side
        assert (whole.count(BOS), whole[0], whole[-1]) == (1, BOS, TOKENIZER.eos_token_id)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [{"role": "assistant", "content": "5"}]},
        {"chosen": [USER, ASSISTANT], "rejected": [USER, {"role": "assistant", "content": "5"}]},
    ],
)
@pytest.mark.parametrize("adds_bos", [False, True])
def test_both_sides_of_a_pair_have_one_bos_and_one_eos(
    config: Callable[..., OfflineConfig], row: dict[str, Any], adds_bos: bool
) -> None:
    tokenizer = char_tokenizer(template=TURNS_WITH_BOS, adds_bos=adds_bos)
    rows, problems = examine_offline(config("dpo", [row], PAIRS), tokenizer)
    assert problems == []
    (pair,) = rows.train
    assert isinstance(pair, Preference)
    assert pair.chosen_ids != pair.rejected_ids
    for completion in (pair.chosen_ids, pair.rejected_ids):
        whole = pair.prompt_ids + completion
        assert (whole.count(BOS), whole[0]) == (1, BOS)
        assert (whole.count(EOS), whole[-1]) == (1, EOS)


def test_what_the_limit_leaves_nothing_of_is_dropped_and_counted(config: Callable[..., OfflineConfig]) -> None:
    rows = [
        {"prompt": "p", "chosen": "same start, one", "rejected": "same start, two"},
        {"prompt": "a prompt longer than the limit", "chosen": "one", "rejected": "two"},
        {"prompt": "q", "chosen": "one", "rejected": "two"},
    ]
    found, problems = examine_offline(config("reward_model", rows, PAIRS[:3], max_tokens=10), TOKENIZER)
    assert problems == [] and len(found.train) == 1 and len(found.eval) == 3
    assert (found.report.identical, found.report.without_labels) == (1, 1)
    assert found.report.files[0].kept == 1


def test_held_out_rows_that_are_dropped_are_counted_in_their_file(config: Callable[..., OfflineConfig]) -> None:
    """Whichever side of the split a row falls on."""
    rows = [{"prompt": f"{i}", "chosen": "same start, one", "rejected": "same start, two"} for i in range(10)]
    found, problems = examine_offline(config("reward_model", rows, max_tokens=10), TOKENIZER)
    assert found.report.identical == 10 and found.report.files[0].kept == 0
    assert {problem.key for problem in problems} == {"data.train", "data.eval"}


def test_labels_come_with_the_pairs(config: Callable[..., OfflineConfig]) -> None:
    labels = {"is_chosen_safe": True, "is_rejected_safe": False}
    found, problems = examine_offline(config("cost_model", [row | labels for row in PAIRS]), TOKENIZER)
    assert problems == []
    assert {(pair.chosen_is_safe, pair.rejected_is_safe) for pair in found.train} == {(True, False)}
    _, problems = examine_offline(config("cost_model", PAIRS), TOKENIZER)
    assert "is_chosen_safe" in problems[0].remedy


def test_sft_reads_completions(config: Callable[..., OfflineConfig]) -> None:
    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]
    found, problems = examine_offline(config("sft", rows), TOKENIZER)
    assert problems == [] and all(isinstance(row, Example) for row in found.train)


def test_training_rows_that_are_also_held_out_are_an_error(config: Callable[..., OfflineConfig]) -> None:
    _, problems = examine_offline(config("reward_model", PAIRS, PAIRS[:2]), TOKENIZER)
    assert [(problem.key, problem.value) for problem in problems] == [("data.eval", "2 overlaps")]


def test_pairs_come_back_from_disk_as_they_were(tmp_path: Path) -> None:
    pairs = [Preference((1, 5), (6, 2), (7, 2), 0.5, True, False), Preference((1,), (6,), (7,))]
    save_pairs(pairs, tmp_path / "pairs.parquet")
    assert load_pairs(tmp_path / "pairs.parquet") == pairs
