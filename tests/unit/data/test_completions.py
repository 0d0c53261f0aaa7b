"""SFT examples and preference pairs: labels from lengths, one BOS, one EOS, nothing lost in silence."""

import pytest

from engine.data.completions import prepare_sft
from engine.errors import DataError
from tests.helpers.prepared import prepare
from tests.helpers.tokenizers import TURNS, TURNS_WITH_BOS, char_tokenizer, merging_tokenizer

BOS, EOS = 1, 2
USER = {"role": "user", "content": "2+2?"}
ASSISTANT = {"role": "assistant", "content": "4"}
TOKENIZER = char_tokenizer(template=TURNS_WITH_BOS)


def sft(data, tokenizer=TOKENIZER, max_tokens=100, **options):
    return prepare_sft(data.train, data, tokenizer, max_tokens=max_tokens, **options)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2=", "answer": 4},
        {"prompt": "2+2=", "completion": "4"},
        {"prompt": [USER], "answer": "4"},
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"messages": [USER, ASSISTANT]},
    ],
)
@pytest.mark.parametrize("make", [char_tokenizer, merging_tokenizer])
@pytest.mark.parametrize("template", [TURNS, TURNS_WITH_BOS])
def test_examples_begin_with_the_ids_that_rollout_gets(jsonl, config, row, make, template):
    tokenizer = make(template=template)
    data = config(jsonl("rows.jsonl", [row, {"prompt": "other", "completion": "x", "answer": "x"}]))
    prepared = prepare(data, tokenizer, needs_answer=False, seed=0)
    (prompt,) = [prompt for prompt in [*prepared.train, *prepared.eval] if prompt.line == 1]
    example = sft(data, tokenizer)[0][0]
    assert example.input_ids[: example.prompt_length] == prompt.input_ids
    assert tokenizer.decode(example.input_ids[example.prompt_length :]) == "4</s>"
    assert example.input_ids.count(BOS) == 1
    assert example.input_ids[0] == BOS


def test_rows_without_room_for_a_label_are_found_and_counted(jsonl, config):
    long, good = {"prompt": "x" * 19, "completion": "abc"}, {"prompt": "short", "completion": "abc"}
    examples, report = sft(config(jsonl("rows.jsonl", [long, good, long])), max_tokens=16)
    assert [example.prompt_length for example in examples] == [6]
    assert report.without_labels == 2
    assert [item["line"] for item in report.to_json()["files"][0]["problems"]] == [1, 3]


def test_no_label_at_all_is_an_error(jsonl, config):
    data = config(jsonl("rows.jsonl", [{"prompt": "x" * 19, "completion": "abc"}] * 3))
    with pytest.raises(DataError, match=r"3 rows.*no row keeps a token to learn below 16 tokens"):
        sft(data, max_tokens=16)


def test_a_prompt_of_exactly_the_limit_has_no_label_and_one_below_has_one(jsonl, config):
    data = config(
        jsonl("rows.jsonl", [{"prompt": "x" * 15, "completion": "a"}, {"prompt": "x" * 14, "completion": "b"}])
    )
    examples, report = sft(data, max_tokens=16)
    assert [(len(example.input_ids), example.prompt_length) for example in examples] == [(16, 15)]
    assert (report.without_labels, report.truncated) == (1, 1)


def test_cut_completions_are_counted_and_have_no_false_end(jsonl, config):
    data = config(jsonl("rows.jsonl", [{"prompt": "ab", "completion": "0123456789"}]))
    examples, report = sft(data, max_tokens=8)
    assert TOKENIZER.decode(examples[0].input_ids) == "<s>ab01234"
    assert report.truncated == 1


def test_prompt_limits_hold_for_examples_too(jsonl, config):
    path = jsonl("rows.jsonl", [{"prompt": "x" * 9, "completion": "abc"}, {"prompt": "y", "completion": "abc"}])
    with pytest.raises(DataError, match=r"the prompt has 10 tokens, data\.max_prompt_tokens is 8"):
        sft(config(path, max_prompt_tokens=8))
    examples, _ = sft(config(path, max_prompt_tokens=8, overlong="keep_end"))
    assert TOKENIZER.decode(examples[0].input_ids) == "<s>" + "x" * 7 + "abc</s>"
    assert examples[0].prompt_length == 8


def test_rows_held_out_of_the_same_file_are_not_learned(jsonl, config):
    rows = [{"prompt": f"row {n % 10}", "answer": str(n)} for n in range(20)]
    data = config(jsonl("rows.jsonl", rows), eval_fraction=0.1)
    prepared = prepare(data, TOKENIZER, needs_answer=True, seed=3)
    examples, report = sft(data, held_out=prepared.eval)
    assert len(examples) == 20 - 2 * len(prepared.eval)
    learned = {example.input_ids[: example.prompt_length] for example in examples}
    assert not learned & {prompt.input_ids for prompt in prepared.eval}
    assert len(report.overlap) == 2 * len(prepared.eval)


def test_rows_of_an_evaluation_file_among_the_examples_follow_the_overlap_option(jsonl, config):
    train, held_out = jsonl("train.jsonl", [{"prompt": "a", "answer": "1"}]), jsonl("eval.jsonl", [{"prompt": "b"}])
    prepared = prepare(config(train, eval=held_out), TOKENIZER, needs_answer=False, seed=0)
    path = jsonl("sft.jsonl", [{"prompt": "B", "answer": "1"}, {"prompt": "c", "answer": "1"}])
    with pytest.raises(DataError, match="1 overlaps"):
        sft(config(path), held_out=prepared.eval)
    assert len(sft(config(path, overlap="drop"), held_out=prepared.eval)[0]) == 1


def test_rows_without_completion_name_the_option(jsonl, config):
    with pytest.raises(DataError, match=r"sft\.data\[0\]\.label_key"):
        sft(config(jsonl("rows.jsonl", [{"prompt": "a", "text": "b"}])))
