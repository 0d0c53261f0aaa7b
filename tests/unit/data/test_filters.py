"""Duplicates, evaluation rows inside the training data, and the automatic evaluation split."""

import pytest

from engine.data.filters import handle_duplicates, hold_out, remove_overlap
from engine.data.gather import Split, gather
from engine.data.schema import COMPLETIONS, PROMPTS


def split_of(data, shape=PROMPTS) -> Split:
    return gather(data.train, "data.train", shape)


def lines(split: Split) -> list[int]:
    return [row.line for row in split.rows]


def test_duplicates_are_counted_and_dropped_only_where_asked(jsonl, config):
    rows = [{"prompt": text, "answer": "4"} for text in ("2+2?", "3+3?", " 2 + 2 ?", "2+2?")]
    data = config(jsonl("rows.jsonl", rows))
    kept, dropped = split_of(data), split_of(data)
    handle_duplicates(kept, drop=False)
    handle_duplicates(dropped, drop=True)
    assert (kept.report.duplicates, lines(kept)) == (2, [1, 2, 3, 4])
    assert (dropped.report.duplicates, lines(dropped)) == (2, [1, 2])
    assert dropped.report.files[0].kept == 2


def test_the_same_prompt_with_another_answer_is_no_duplicate(jsonl, config):
    split = split_of(config(jsonl("rows.jsonl", [{"prompt": "p", "answer": "1"}, {"prompt": "p", "answer": "2"}])))
    handle_duplicates(split, drop=True)
    assert lines(split) == [1, 2]


def test_the_same_prompt_with_another_completion_is_no_duplicate(jsonl, config):
    rows = [{"prompt": "p", "completion": text} for text in ("one", "two", "ONE")]
    split = split_of(config(jsonl("rows.jsonl", rows)), COMPLETIONS)
    handle_duplicates(split, drop=True)
    assert lines(split) == [1, 2]


@pytest.fixture
def overlapping(jsonl, config):
    """100 training rows and 10 evaluation rows, 3 of which are training rows apart from case and spaces."""
    train = jsonl("train.jsonl", [{"prompt": f"What is {n} plus {n}?"} for n in range(100)])
    shared = [{"prompt": f"  what IS {n}\tplus {n} ?"} for n in (5, 50, 95)]
    held_out = jsonl("eval.jsonl", [{"prompt": f"What is {n} minus {n}?"} for n in range(7)] + shared)
    return split_of(config(train)), split_of(config(held_out))


def test_overlap_fails_with_both_places_of_every_row(overlapping):
    train, held_out = overlapping
    remove_overlap(train, held_out.rows, "data.eval", allowed=False)
    (problem,) = train.problems
    assert (problem.key, problem.value) == ("data.eval", "3 overlaps")
    assert f"{train.report.files[0].path}:6 = {held_out.report.files[0].path}:8" in problem.remedy
    assert "data.overlap: drop" in problem.remedy


def test_overlap_is_dropped_from_training_and_counted(overlapping):
    train, held_out = overlapping
    remove_overlap(train, held_out.rows, "data.eval", allowed=True)
    assert not train.problems
    assert len(train.rows) == 97
    assert not {6, 51, 96} & set(lines(train))
    assert len(held_out.rows) == 10
    report = train.report.to_json()
    assert [pair["train"].rsplit(":", 1)[1] for pair in report["overlap"]] == ["6", "51", "96"]
    assert report["files"][0]["dropped"] == 3


def test_a_long_list_of_overlaps_is_cut_after_twenty(jsonl, config):
    path = jsonl("rows.jsonl", [{"prompt": f"row {n}"} for n in range(25)])
    train = split_of(config(path))
    remove_overlap(train, split_of(config(path)).rows, "data.eval", allowed=False)
    assert train.problems[0].remedy.count(" = ") == 20
    assert "and 5 more" in train.problems[0].remedy
    assert len(train.report.overlap) == 25


def hundred(jsonl, config, name="rows.jsonl", rows=None) -> Split:
    return split_of(config(jsonl(name, rows or [{"prompt": f"row {n}"} for n in range(100)])))


def test_held_out_rows_leave_the_training_rows(jsonl, config):
    train = hundred(jsonl, config)
    held_out = hold_out(train, 0.01, seed=7)
    assert (len(held_out), len(train.rows)) == (1, 99)
    assert not {row.key for row in held_out} & {row.key for row in train.rows}
    assert train.report.files[0].kept == 100


def test_the_held_out_share_is_fixed_by_the_seed(jsonl, config):
    def drawn(seed: int) -> list[int]:
        return [row.line for row in hold_out(hundred(jsonl, config), 0.2, seed)]

    assert len(drawn(7)) == 20
    assert drawn(7) == drawn(7) == sorted(drawn(7))
    assert drawn(7) != drawn(8)


def test_the_held_out_prompts_do_not_depend_on_the_order_of_the_file(jsonl, config):
    forward = hundred(jsonl, config)
    backward = hundred(jsonl, config, "back.jsonl", [{"prompt": f"row {n}"} for n in reversed(range(100))])
    assert {row.key for row in hold_out(forward, 0.1, 7)} == {row.key for row in hold_out(backward, 0.1, 7)}


def test_a_duplicate_of_a_held_out_row_never_stays_in_training(jsonl, config):
    rows = [{"prompt": f"{space}row {n % 10}"} for n, space in enumerate([""] * 10 + [" "] * 10)]
    train = hundred(jsonl, config, rows=rows)
    held_out = hold_out(train, 0.3, seed=7)
    assert len(held_out) == 3  # a share of the ten different prompts: training loses the same share of its rows
    assert all(row.line <= 10 for row in held_out)
    assert len(train.rows) == 20 - 2 * 3
    assert not {row.key for row in held_out} & {row.key for row in train.rows}
    assert len(train.report.files[0].problems) == 3
    assert "says the same as the held-out row" in train.report.files[0].problems[0].reason


def test_training_keeps_at_least_one_prompt(jsonl, config):
    train = hundred(jsonl, config, rows=[{"prompt": "a"}, {"prompt": "b"}])
    assert len(hold_out(train, 0.99, seed=0)) == 1
    assert len(train.rows) == 1


def test_one_prompt_cannot_be_split(jsonl, config):
    train = hundred(jsonl, config, rows=[{"prompt": "a"}, {"prompt": "A"}])
    assert hold_out(train, 0.5, seed=0) == []
    assert train.problems[0].key == "data.eval"
