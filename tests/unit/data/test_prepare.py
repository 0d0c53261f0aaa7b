"""From sources to prompts: everything that is wrong in one message, and prompts that carry their identity."""

import pickle
import random
from pathlib import Path

import pytest

from engine.config import DataSource, SuiteConfig
from engine.data.templating import load_tokenizer
from engine.errors import DataError
from tests.helpers.prepared import prepare
from tests.helpers.tokenizers import TURNS_WITH_BOS, char_tokenizer

PRESETS = Path(__file__).parents[3] / "deployments" / "presets"
TOKENIZER = char_tokenizer(template=TURNS_WITH_BOS)


def run(data, *, needs_answer=False, seed=7, suites=()):
    return prepare(data, TOKENIZER, needs_answer=needs_answer, seed=seed, suites=suites)


def refused(data, **options) -> str:
    with pytest.raises(DataError) as caught:
        run(data, **options)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301
    return str(caught.value)


def numbered(jsonl, name: str, word: str, count: int) -> str:
    return jsonl(name, [{"prompt": f"{word} {n}", "answer": n} for n in range(count)])


def test_prompts_are_numbered_in_the_order_of_their_files(jsonl, config):
    paths = [numbered(jsonl, f"{word}.jsonl", word, 3) for word in ("one", "two")]
    train = run(config(*paths, eval=numbered(jsonl, "eval.jsonl", "eval", 1))).train
    assert [prompt.index for prompt in train] == list(range(6))
    assert [(prompt.file, prompt.line) for prompt in train] == [(path, n) for path in paths for n in (1, 2, 3)]
    assert [prompt.answer for prompt in train] == ["0", "1", "2"] * 2
    assert train[0].text == "one 0"
    assert train[0].input_ids == (1, *TOKENIZER.convert_tokens_to_ids(list("one 0")))


def test_without_evaluation_data_a_share_of_the_training_rows_is_held_out(jsonl, config):
    prepared = run(config(numbered(jsonl, "rows.jsonl", "row", 100)))
    assert (len(prepared.train), len(prepared.eval)) == (99, 1)
    assert prepared.eval[0].place not in {prompt.place for prompt in prepared.train}
    assert [prompt.index for prompt in prepared.train] == list(range(99))
    assert prepared.eval[0].index == 0


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_byte_order_mark_changes_neither_prompts_nor_fingerprints(raw, config, suffix):
    content = {
        "jsonl": b'{"prompt":"2+2?","answer":"4"}\n{"prompt":"3+3?","answer":"6"}\n',
        "csv": b"prompt,answer\n2+2?,4\n3+3?,6\n",
    }[suffix]
    path = raw(f"rows.{suffix}", content)
    plain = run(config(path), needs_answer=True)
    raw(f"rows.{suffix}", b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n"))
    marked = run(config(path), needs_answer=True)
    assert marked == plain
    assert marked.report.columns == {"prompt": "string", "answer": "string"}


def test_all_problems_of_all_files_are_in_one_message(jsonl, raw, config):
    broken = raw("broken.jsonl", b'{"prompt":"a"}\n\n{"prompt":"b"}\n   \n{"prompt": \n[]\n{"prompt":"c"}\n')
    renamed = jsonl("renamed.jsonl", [{"question": "a", "level": 1}])
    message = refused(config(broken, renamed, "missing.jsonl", eval="absent.csv"))
    for part in (
        f"{broken}, line 5",
        f"{broken}, line 6",
        "must be a JSON object",
        f"{renamed} has no column `prompt` or `messages`; columns found: level, question",
        "data.train[1].input_key",
        "data.train[2].path = 'missing.jsonl': there is no such file or folder",
        "data.eval[0].path = 'absent.csv'",
        "data.bad_lines: skip",
    ):
        assert part in message


def test_a_renamed_prompt_column_and_no_answer_name_both_options(jsonl, config):
    message = refused(config(jsonl("rows.jsonl", [{"question": "2+2?"}])), needs_answer=True)
    assert "data.train[0].input_key" in message
    assert "data.train[0].label_key" in message


def test_a_blank_data_source_is_refused_with_its_line(jsonl, config):
    rows = [{"prompt": "a", "data_source": "gsm8k"}, {"prompt": "b", "data_source": ""}]
    path = jsonl("rows.jsonl", rows)
    assert f"{path}, line 2': `data_source` is blank" in refused(config(path))


def test_no_message_shows_what_a_row_says(raw, config):
    path = raw("rows.jsonl", b'{"prompt": "sesame", "answer": ["sesame"]}\n{"prompt": "sesame"\n["sesame"]\n')
    assert "sesame" not in refused(config(path))


def test_more_than_twenty_bad_lines_are_counted(raw, config):
    path = raw("rows.jsonl", b"x\n" * 50)
    message = refused(config(path))
    assert message.count("is not valid JSON") == 20
    assert "50 such lines in all" in message


def test_bad_lines_may_be_skipped_up_to_a_share(raw, config):
    path = raw("rows.jsonl", b'{"prompt":"a"}\n\n{"prompt":"b"}\n   \n{"prompt": \n[]\n{"prompt":"c"}\n')
    prepared = run(config(path, bad_lines="skip", max_bad_share=0.4))
    assert len(prepared.train) + len(prepared.eval) == 3
    (file,) = prepared.report.to_json()["files"]
    assert (file["rows"], file["kept"], file["dropped"], file["bad_lines"]) == (5, 3, 2, 2)
    assert [item["line"] for item in file["problems"]] == [5, 6]
    message = refused(config(path, bad_lines="skip", max_bad_share=0.39))
    assert "2 bad lines of 5" in message
    assert "data.max_bad_share = 0.39 allows (lines 5, 6)" in message


def test_a_long_list_of_skipped_lines_is_cut(raw, config):
    path = raw("rows.jsonl", b"x\n" * 50)
    message = refused(config(path, bad_lines="skip"))
    assert "50 bad lines of 50" in message
    assert "19, 20)" in message


def test_rows_of_other_types_are_judged_one_by_one_in_any_order(jsonl, config):
    rows = [{"prompt": f"p{n}", "answer": answer} for n, answer in enumerate([4, "4", "4a", None, [4]])]
    orders = [list(range(5)), [4, 3, 2, 1, 0], random.Random(1).sample(range(5), 5)]
    for order in orders:
        path = jsonl("rows.jsonl", [rows[index] for index in order])
        prepared = run(config(path, bad_lines="skip", max_bad_share=0.5, eval=numbered(jsonl, "e.jsonl", "e", 1)))
        expected = {"p0": "4", "p1": "4", "p2": "4a", "p3": None}
        assert {prompt.text: prompt.answer for prompt in prepared.train} == expected
        assert [item.line for item in prepared.report.files[0].problems] == [order.index(4) + 1]


def test_a_null_answer_is_refused_where_the_reward_needs_it(jsonl, config):
    path = jsonl("rows.jsonl", [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": None}])
    assert "line 2': the reference answer is missing or empty" in refused(config(path), needs_answer=True)


def test_nothing_left_is_an_error(jsonl, raw, config):
    assert "0 rows read" in refused(config(raw("empty.jsonl", b"\n")))
    path = jsonl("rows.jsonl", [{"prompt": "far too long"}] * 3)
    assert "3 rows read" in refused(config(path, max_prompt_tokens=4, overlong="filter"))
    held_out = jsonl("eval.jsonl", [{"prompt": "Far too long"}])
    assert "no row is left" in refused(config(path, eval=held_out, overlap="drop"))


def test_overlap_with_the_evaluation_rows(jsonl, config):
    train = jsonl("train.jsonl", [{"prompt": f"What is {n}?"} for n in range(10)])
    held_out = jsonl("eval.jsonl", [{"prompt": "what  IS 3 ?"}, {"prompt": "other"}])
    assert f"{train}:4 = {held_out}:1" in refused(config(train, eval=held_out))
    prepared = run(config(train, eval=held_out, overlap="drop"))
    assert (len(prepared.train), len(prepared.eval)) == (9, 2)
    assert prepared.report.to_json()["overlap"] == [{"train": f"{train}:4", "eval": f"{held_out}:1"}]


def test_suites_with_their_own_rows_are_prepared_and_kept_out_of_training(jsonl, config):
    train = jsonl("train.jsonl", [{"prompt": f"What is {n}?"} for n in range(10)])
    path = jsonl("suite.jsonl", [{"prompt": "what is 3?"}, {"prompt": "other"}])
    suites = (SuiteConfig(), SuiteConfig(name="hard", data=(DataSource(path=path),)))
    assert "evaluation.suites[1].data = '1 overlaps'" in refused(config(train), suites=suites)
    prepared = run(config(train, overlap="drop"), suites=suites)
    assert [prompt.text for prompt in prepared.suites["hard"]] == ["what is 3?", "other"]
    assert len(prepared.train) + len(prepared.eval) == 9
    assert set(prepared.fingerprints) == {"data/train", "data/eval", "data/suite/hard", "tokenizer"}


def test_a_system_prompt_that_no_row_can_use_is_refused(jsonl, config):
    message = refused(config(jsonl("rows.jsonl", [{"prompt": "a"}, {"prompt": "b"}]), system_prompt="Be brief."))
    assert "data.system_prompt = 'Be brief.'" in message
    rows = [{"prompt": "a"}, {"prompt": [{"role": "user", "content": "b"}]}, {"prompt": "c"}]
    run(config(jsonl("rows.jsonl", rows), system_prompt="Be brief."))


def test_duplicates_are_dropped_where_asked(jsonl, config):
    rows = [{"prompt": text} for text in ("a", "b", "c", "A ", "b")]
    held_out = numbered(jsonl, "eval.jsonl", "eval", 1)
    path = jsonl("rows.jsonl", rows)
    kept, dropped = run(config(path, eval=held_out)), run(config(path, eval=held_out, duplicates="drop"))
    assert (len(kept.train), kept.report.duplicates) == (5, 2)
    assert (len(dropped.train), dropped.report.duplicates) == (3, 2)


def test_fingerprints_follow_the_content_and_nothing_else(jsonl, raw, config):
    path = numbered(jsonl, "rows.jsonl", "row", 10)
    first = run(config(path)).fingerprints
    assert run(config(numbered(jsonl, "copy.jsonl", "row", 10))).fingerprints == first
    assert run(config(path, max_prompt_tokens=9)).fingerprints == first  # options are in the digest by themselves
    numbered(jsonl, "rows.jsonl", "roW", 10)
    changed = run(config(path)).fingerprints
    assert changed["data/train"] != first["data/train"]
    assert changed["tokenizer"] == first["tokenizer"]


def test_the_fingerprint_of_held_out_rows_follows_the_seed(jsonl, config):
    path = numbered(jsonl, "rows.jsonl", "row", 100)
    one, other = run(config(path), seed=1).fingerprints, run(config(path), seed=2).fingerprints
    assert one["data/train"] == other["data/train"]
    assert one["data/eval"] != other["data/eval"]


def test_the_same_row_has_the_same_ids_for_training_and_evaluation(jsonl, config):
    row = {"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4"}
    path = jsonl("rows.jsonl", [row, {"prompt": "other", "answer": "1"}])
    prepared = run(config(path, eval=jsonl("eval.jsonl", [row]), overlap="drop"))
    alone = run(config(path, eval=jsonl("other.jsonl", [{"prompt": "third", "answer": "1"}])))
    assert alone.train[0].input_ids == prepared.eval[0].input_ids


def test_characters_that_the_tokenizer_does_not_know_are_found_by_line(jsonl, config):
    """The presets' vocabulary holds digits and signs alone; its tokenizer raises on anything else."""
    tokenizer = load_tokenizer(str(PRESETS / "models" / "addition"), None)
    rows = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "one+2=", "answer": "3"}, {"prompt": "2+2=", "answer": "4"}]
    path = jsonl("rows.jsonl", rows)
    with pytest.raises(DataError, match=r"rows\.jsonl.*line 2.*the tokenizer refuses the text"):
        prepare(config(path), tokenizer, needs_answer=True, seed=7)
    prepared = prepare(config(path, bad_lines="skip", max_bad_share=0.5), tokenizer, needs_answer=True, seed=7)
    assert {prompt.line for prompt in [*prepared.train, *prepared.eval]} == {1, 3}
