"""The prompt limit, measured on the ids that are sent to the engine."""

import pytest

from engine.data.encode import encode_rows, limit_prompts
from engine.data.gather import Split, gather
from engine.data.schema import PROMPTS
from engine.data.templating import PromptEncoder
from tests.helpers.tokenizers import TURNS, TURNS_WITH_BOS, char_tokenizer

# With its BOS, a prompt of n characters has n + 1 tokens.
LENGTHS = [5, 8, 9, 40]


def encoded(data, tokenizer) -> Split:
    split = gather(data.train, "data.train", PROMPTS)
    encode_rows(split, PromptEncoder(tokenizer, data.system_prompt))
    return split


def limited(data, tokenizer) -> Split:
    split = encoded(data, tokenizer)
    limit_prompts(split, PromptEncoder(tokenizer, data.system_prompt), data)
    return split


@pytest.fixture
def path(jsonl):
    return jsonl("rows.jsonl", [{"prompt": ("abcdefgh" * 5)[: length - 1]} for length in LENGTHS])


def test_error_names_every_long_row_with_its_length(path, config):
    problems = limited(config(path, max_prompt_tokens=8), char_tokenizer()).problems
    assert [(item.value.removeprefix(path), item.remedy) for item in problems[:2]] == [
        (", line 3", "the prompt has 9 tokens, data.max_prompt_tokens is 8"),
        (", line 4", "the prompt has 40 tokens, data.max_prompt_tokens is 8"),
    ]
    assert "2 such lines" in problems[2].value
    assert "data.overlong" in problems[2].remedy


def test_filter_keeps_what_fits_and_counts_the_rest(path, config):
    split = limited(config(path, max_prompt_tokens=8, overlong="filter"), char_tokenizer())
    assert [len(row.ids) for row in split.rows] == [5, 8]
    assert not split.problems
    report = split.report.to_json()
    assert (report["files"][0]["kept"], report["files"][0]["dropped"]) == (2, 2)
    assert [item["line"] for item in report["files"][0]["problems"]] == [3, 4]
    assert report["prompt_tokens"] == {"min": 5, "p50": 8, "p95": 40, "max": 40}


@pytest.mark.parametrize("bos", [True, False])
def test_keep_end_cuts_at_the_beginning_and_keeps_the_bos(path, config, bos):
    tokenizer = char_tokenizer(bos=bos)
    data = config(path, max_prompt_tokens=8, overlong="keep_end")
    split = limited(data, tokenizer)
    whole = [row.ids for row in encoded(data, tokenizer).rows]
    assert len(split.rows) == 4
    for row, before in zip(split.rows, whole, strict=True):
        assert len(row.ids) == min(8, len(before))
        assert row.ids[bos:] == before[len(before) - len(row.ids) + bos :]
        assert (row.ids[0] == 1) is bos
        assert row.text == tokenizer.decode(row.ids) or len(before) <= 8


@pytest.mark.parametrize("template", [TURNS, TURNS_WITH_BOS])
def test_keep_end_keeps_the_whole_generation_prompt(jsonl, config, template):
    path = jsonl("rows.jsonl", [{"prompt": [{"role": "user", "content": "x" * 50}]}])
    tokenizer = char_tokenizer(template=template)
    split = limited(config(path, max_prompt_tokens=14, overlong="keep_end"), tokenizer)
    assert split.rows[0].text == "<s>x\n[assistant]"
    assert len(split.rows[0].ids) == 14


def test_keep_end_refuses_a_limit_that_cuts_into_the_generation_prompt(jsonl, config):
    path = jsonl("rows.jsonl", [{"prompt": [{"role": "user", "content": "x" * 50}]}])
    data = config(path, max_prompt_tokens=12, overlong="keep_end")
    problems = limited(data, char_tokenizer(template=TURNS)).problems
    assert [(item.key, item.value) for item in problems] == [("data.max_prompt_tokens", 12)]
    assert "at least 13" in problems[0].remedy


def test_the_limit_counts_the_template_and_the_system_prompt(jsonl, config):
    path = jsonl("rows.jsonl", [{"prompt": [{"role": "user", "content": "hi"}]}])
    length = len("[user]hi\n[assistant]") + 1
    assert not limited(config(path, max_prompt_tokens=length), char_tokenizer(template=TURNS)).problems
    assert limited(config(path, max_prompt_tokens=length - 1), char_tokenizer(template=TURNS)).problems
    longer = config(path, max_prompt_tokens=length, system_prompt="Be brief.")
    assert limited(longer, char_tokenizer(template=TURNS)).problems


def test_messages_without_a_template_name_the_folder_and_the_option(jsonl, config):
    path = jsonl("rows.jsonl", [{"prompt": "p"}, {"prompt": [{"role": "user", "content": "hi"}]}])
    tokenizer = char_tokenizer()
    tokenizer.name_or_path = "/models/base"
    split = limited(config(path), tokenizer)
    (problem,) = split.problems
    assert split.report.prompt_lengths == []
    assert problem.key == "model.chat_template"
    assert "/models/base has no chat template" in problem.remedy
    assert f"{path}, line 2" in problem.remedy


def test_plain_prompts_need_no_template(jsonl, config):
    split = encoded(config(jsonl("rows.jsonl", [{"prompt": "p"}])), char_tokenizer())
    assert len(split.rows) == 1
    assert not split.problems


def test_a_conversation_that_the_template_refuses_is_a_bad_line(jsonl, config):
    path = jsonl("rows.jsonl", [{"prompt": [{"role": role, "content": "hi"}]} for role in ("user", "tool")])
    template = "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + TURNS
    split = encoded(config(path), char_tokenizer(template=template))
    assert [row.line for row in split.rows] == [1]
    assert [(item.line, "no tools" in item.reason) for item in split.bad[0]] == [(2, True)]


def test_text_that_gives_no_token_is_a_bad_line(jsonl, config):
    tokenizer = char_tokenizer()
    path = jsonl("rows.jsonl", [{"prompt": "p"}, {"prompt": "<s>"}])
    split = encoded(config(path), tokenizer)
    assert [item.line for item in split.bad[0]] == [2]
