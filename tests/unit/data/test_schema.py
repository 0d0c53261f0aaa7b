"""Row shapes of verl, TRL and OpenRLHF, and everything a row must not be."""

import random

import pytest

from engine.config import DataSource
from engine.data.preferences import HELPFULNESS
from engine.data.schema import (
    ANSWERED_PROMPTS,
    COMPLETIONS,
    PROMPTS,
    BadRow,
    Content,
    completion_row,
    content_key,
    preference_row,
    prompt_row,
)

PLAIN = DataSource(path="rows.jsonl")
USER = {"role": "user", "content": "2+2?"}
SYSTEM = {"role": "system", "content": "Be brief."}
ASSISTANT = {"role": "assistant", "content": "4"}


def test_plain_row():
    assert prompt_row({"prompt": "2+2?", "answer": "4", "level": 1}, PLAIN) == Content("2+2?", "4", extra={"level": 1})


def test_conversation_row():
    assert prompt_row({"prompt": [SYSTEM, USER]}, PLAIN).prompt == [SYSTEM, USER]


def test_verl_row():
    row = {
        "data_source": "gsm8k",
        "prompt": [USER],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": 4},
        "extra_info": {"split": "train", "index": 7},
    }
    extra = {"ability": "math", "split": "train", "index": 7}
    assert prompt_row(row, PLAIN) == Content([USER], "4", "gsm8k", extra)


def test_trl_language_modelling_row_ends_before_the_answer():
    row = {"messages": [SYSTEM, USER, ASSISTANT]}
    assert prompt_row(row, PLAIN).prompt == [SYSTEM, USER]
    assert completion_row(row, PLAIN) == Content([SYSTEM, USER], completions=("4",))
    assert row == {"messages": [SYSTEM, USER, ASSISTANT]}


@pytest.mark.parametrize("completion", ["4", [ASSISTANT]])
def test_trl_prompt_completion_rows(completion):
    assert completion_row({"prompt": [USER], "completion": completion}, PLAIN).completions == ("4",)


def test_openrlhf_row_by_keys():
    source = DataSource(path="rows.jsonl", input_key="question", label_key="label")
    row = {"question": "2+2?", "label": 4, "answer": "not this"}
    assert prompt_row(row, source) == Content("2+2?", "4", extra={"answer": "not this"})
    assert completion_row(row, source).completions == ("4",)


def test_reasoning_gym_row_keeps_its_metadata():
    row = {"prompt": "2+2?", "answer": "4", "metadata": {"difficulty": {"terms": 2}}}
    assert prompt_row(row, PLAIN).extra == {"metadata": {"difficulty": {"terms": 2}}}


def test_absent_keys_that_arrow_filled_with_null_are_not_part_of_a_message():
    assert prompt_row({"prompt": [{**USER, "tool_calls": None}]}, PLAIN).prompt == [USER]


def test_the_declared_type_decides_whatever_the_order_of_the_rows():
    answers = [4, "4", "4a", None, [4]]
    rows = [{"prompt": "p", "answer": answer} for answer in answers]

    def verdict(row: dict) -> str | None:
        try:
            return prompt_row(row, PLAIN).answer
        except BadRow as error:
            return str(error)

    expected = ["4", "4", "4a", None, "`answer` must be text, a number or null, found a list"]
    assert [verdict(row) for row in rows] == expected
    order = random.Random(0).sample(range(5), 5)
    assert [verdict(rows[index]) for index in order] == [expected[index] for index in order]


@pytest.mark.parametrize(("value", "found"), [(True, "a boolean"), ({"a": 1}, "an object"), ([], "a list")])
def test_answers_of_other_types_are_refused(value, found):
    with pytest.raises(BadRow, match=f"found {found}"):
        prompt_row({"prompt": "p", "reward_model": {"ground_truth": value}}, PLAIN)


@pytest.mark.parametrize("answer", [None, "", "  "])
def test_a_reward_that_needs_the_answer_refuses_rows_without(answer):
    with pytest.raises(BadRow, match="answer is missing or empty"):
        ANSWERED_PROMPTS.parse({"prompt": "p", "answer": answer}, PLAIN)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (None, "found null"),
        ("", "`prompt` is empty"),
        (" \n", "`prompt` is empty"),
        (5, "found a number"),
        ({"role": "user"}, "found an object"),
        ([], "empty list of messages"),
        (["text"], r"`prompt\[0\]` must be an object with role and content, found text"),
        ([{"from": "human", "value": "hi"}], "role` must be one of system, user, assistant, tool"),
        ([{"role": "bot", "content": "hi"}], "role` must be one of"),
        ([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "content` must be text, found a list"),
        ([{"role": "user", "content": None}], "content` must be text, found null"),
        ([{"role": "user"}], "content` must be text, found null"),
        ([{"role": "user", "content": " "}], "last message of the prompt in `prompt` is empty"),
        ([SYSTEM], "must end with a message of the user"),
        ([USER, ASSISTANT], "must end with a message of the user"),
    ],
)
def test_prompts_that_cannot_be_used(prompt, reason):
    with pytest.raises(BadRow, match=reason):
        prompt_row({"prompt": prompt}, PLAIN)


def test_a_conversation_of_the_assistant_alone_has_no_prompt():
    with pytest.raises(BadRow, match="must end with a message of the user"):
        prompt_row({"messages": [ASSISTANT]}, PLAIN)


@pytest.mark.parametrize("name", ["", "  ", 3])
def test_a_blank_data_source_is_refused(name):
    with pytest.raises(BadRow, match="data_source"):
        prompt_row({"prompt": "p", "data_source": name}, PLAIN)


def test_a_data_source_that_arrow_filled_with_null_is_absent():
    assert prompt_row({"prompt": "p", "data_source": None}, PLAIN).source == ""


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "p", "completion": ""},
        {"prompt": "p", "completion": None},
        {"prompt": "p", "completion": [USER]},
        {"prompt": [USER], "completion": [ASSISTANT, ASSISTANT]},
        {"prompt": [USER], "completion": []},
        {"messages": [USER]},
        {"prompt": "p", "answer": None},
    ],
)
def test_rows_without_a_completion_are_refused(row):
    with pytest.raises(BadRow):
        completion_row(row, PLAIN)


def test_no_message_of_a_bad_row_shows_its_content():
    rows = [
        {"prompt": [{"role": "secret", "content": "secret"}]},
        {"prompt": "p", "answer": ["secret"]},
        {"prompt": {"secret": "secret"}},
    ]
    for row in rows:
        with pytest.raises(BadRow) as caught:
            prompt_row(row, PLAIN)
        assert "secret" not in str(caught.value)


# --- preferences -----------------------------------------------------------------------------------------------------


def test_explicit_plain_preference():
    row = {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}
    assert preference_row(row, PLAIN) == Content("The sky is", completions=(" blue.", " green."))


def test_implicit_plain_preference_is_split_at_a_word():
    content = preference_row({"chosen": "The sky is blue.", "rejected": "The sky is blurred."}, PLAIN)
    assert content == Content("The sky is", completions=(" blue.", " blurred."))


def test_explicit_conversational_preference():
    row = {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [{"role": "assistant", "content": "5"}]}
    assert preference_row(row, PLAIN) == Content([USER], completions=("4", "5"))


@pytest.mark.parametrize("prompt", [None, "2+2?", [USER]])
def test_whole_conversations_hold_the_prompt_themselves(prompt):
    row = {"prompt": prompt, "chosen": [USER, ASSISTANT], "rejected": [USER, {"role": "assistant", "content": "5"}]}
    assert preference_row(row, PLAIN) == Content([USER], completions=("4", "5"))


def test_a_text_prompt_of_message_completions_becomes_a_user_message():
    row = {"prompt": "2+2?", "chosen": [ASSISTANT], "rejected": [{"role": "assistant", "content": "5"}]}
    assert preference_row(row, PLAIN).prompt == [USER]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "p", "chosen": "a", "rejected": "a"},
        {"prompt": "p", "chosen": "a", "rejected": None},
        {"chosen": "apple", "rejected": "pear"},
        {"chosen": "The sky", "rejected": "The sky"},
        {"chosen": "The sky", "rejected": "The"},
        {"chosen": [USER, ASSISTANT], "rejected": [SYSTEM, ASSISTANT]},
        {"chosen": [USER], "rejected": [USER]},
        {"chosen": [], "rejected": []},
        {"prompt": "p", "chosen": "a", "rejected": ["b"]},
    ],
)
def test_preferences_that_cannot_be_used(row):
    with pytest.raises(BadRow):
        preference_row(row, PLAIN)


# --- columns that a file lacks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "columns", "options"),
    [
        (PROMPTS, {"question"}, {"input_key"}),
        (PROMPTS, {"prompt"}, set()),
        (PROMPTS, {"messages"}, set()),
        (ANSWERED_PROMPTS, {"question"}, {"input_key", "label_key"}),
        (ANSWERED_PROMPTS, {"prompt", "reward_model"}, set()),
        (COMPLETIONS, {"prompt"}, {"label_key"}),
        (COMPLETIONS, {"prompt", "completion"}, set()),
        (COMPLETIONS, {"messages"}, set()),
        (HELPFULNESS, {"chosen", "rejected"}, set()),
        (HELPFULNESS, {"prompt", "chosen"}, {"path"}),
    ],
)
def test_missing_columns_name_the_option_to_change(shape, columns, options):
    assert set(shape.missing(columns, PLAIN)) == options


def test_configured_keys_must_exist():
    source = DataSource(path="rows.jsonl", input_key="question", label_key="label")
    assert set(ANSWERED_PROMPTS.missing({"prompt", "answer"}, source)) == {"input_key", "label_key"}
    assert ANSWERED_PROMPTS.missing({"question", "label"}, source) == {}


# --- sameness --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 2+2?", "  what IS\n2 + 2 ?"),
        ("2+2?", [USER]),
        ([USER], [SYSTEM, USER]),
        ("STRASSE", "straße"),
        ("a\u00a0b", "a b"),
    ],
)
def test_prompts_that_say_the_same(one, other):
    assert content_key(one) == content_key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [("sort 1 23", "sort 12 3"), ("2+2?", "2-2?"), ("a b", "ab"), ([USER, ASSISTANT, USER], [USER])],
)
def test_prompts_that_say_something_else(one, other):
    assert content_key(one) != content_key(other)
