"""Recognises what a row is: plain, verl, TRL or OpenRLHF shape; declared types decide, never the first rows of a file.

A prompt is text or a list of chat messages. It stands in `prompt`, in `messages`, or in the column of `input_key`. The
reference answer stands in the column of `label_key`, in `reward_model.ground_truth` (verl) or in `answer`; it is text
or null, a number becomes its text, everything else is refused.
"""

import hashlib
import re
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

from engine.config import DataSource

Message = dict[str, Any]
Conversation = list[Message]

ROLES = ("system", "user", "assistant", "tool")


class BadRow(ValueError):
    """Why one row cannot be used; the text names columns and types, never content."""


@dataclass(frozen=True)
class Content:
    """The meaning of one row.

    completions: none for a prompt, the answer to learn for SFT, (chosen, rejected) for a preference.
    """

    prompt: str | Conversation
    answer: str | None = None
    source: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    completions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shape:
    """What a stage needs of its rows: how to read one, and which option names a column that the file lacks."""

    parse: Callable[[dict[str, Any], DataSource], Content]
    missing: Callable[[Set[str], DataSource], dict[str, str]]


# --- prompts ---------------------------------------------------------------------------------------------------------


def prompt_row(values: dict[str, Any], source: DataSource) -> Content:
    """A prompt, with its reference answer where there is one. Raises BadRow."""
    column = _prompt_column(values.keys(), source)
    prompt, _ = _prompt(values.get(column), column)
    answer_column, answer = _answer(values, source)
    extra = {name: value for name, value in values.items() if name not in (column, answer_column, "data_source")}
    described = extra.get("extra_info")
    if isinstance(described, dict):  # verl puts there what its scorers read; its names win over columns
        del extra["extra_info"]
        extra |= described
    return Content(prompt, answer, _data_source(values), extra)


def answered_prompt_row(values: dict[str, Any], source: DataSource) -> Content:
    """A prompt that has a reference answer. Raises BadRow."""
    content = prompt_row(values, source)
    if content.answer is None or not content.answer.strip():
        raise BadRow("the reference answer is missing or empty")
    return content


def completion_row(values: dict[str, Any], source: DataSource) -> Content:
    """A prompt with the completion to learn: `completion`, the last assistant turn, or the reference answer."""
    column = _prompt_column(values.keys(), source)
    prompt, turn = _prompt(values.get(column), column)
    if source.label_key is None and "completion" in values:
        completion = _completion(values["completion"], "completion")
    elif source.label_key is None and turn is not None:
        completion = turn
    else:
        answer_column, answer = _answer(values, source)
        completion = _completion(answer, answer_column)
    return Content(prompt, source=_data_source(values), completions=(completion,))


def preference_row(values: dict[str, Any], source: DataSource) -> Content:
    """A prompt with a chosen and a rejected completion; the prompt may be implicit, as what both begin with."""
    chosen, rejected = values.get("chosen"), values.get("rejected")
    column = _prompt_column(values.keys(), source)
    if isinstance(chosen, list) and isinstance(rejected, list):
        prompt, completions = _chat_preference(values.get(column), column, chosen, rejected)
    elif values.get(column) is not None:
        prompt, _ = _prompt(values[column], column)
        completions = _completion(chosen, "chosen"), _completion(rejected, "rejected")
    else:
        prompt, completions = _shared_beginning(_completion(chosen, "chosen"), _completion(rejected, "rejected"))
    if completions[0] == completions[1]:
        raise BadRow("`chosen` and `rejected` are equal")
    return Content(prompt, source=_data_source(values), completions=completions)


# --- columns a whole file lacks --------------------------------------------------------------------------------------


def lacks_prompt(columns: Set[str], source: DataSource) -> dict[str, str]:
    """{option: what is missing} for a file without a prompt column."""
    if source.input_key is not None:
        return {} if source.input_key in columns else {"input_key": f"no column `{source.input_key}`"}
    return {} if {"prompt", "messages"} & columns else {"input_key": "no column `prompt` or `messages`"}


def lacks_prompt_or_answer(columns: Set[str], source: DataSource) -> dict[str, str]:
    """{option: what is missing} for a file of which the reward needs prompt and reference answer."""
    found = lacks_prompt(columns, source)
    if source.label_key is not None:
        return found if source.label_key in columns else found | {"label_key": f"no column `{source.label_key}`"}
    if {"answer", "reward_model"} & columns:
        return found
    return found | {"label_key": "no column `answer` or `reward_model`"}


def lacks_completion(columns: Set[str], source: DataSource) -> dict[str, str]:
    """{option: what is missing} for a file that supervised fine-tuning reads."""
    if source.label_key is None and ("completion" in columns or _prompt_column(columns, source) != "prompt"):
        return lacks_prompt(columns, source)
    return lacks_prompt_or_answer(columns, source)


def lacks_preference(columns: Set[str], source: DataSource) -> dict[str, str]:
    """{option: what is missing} for a file of preferences; only the prompt may be left out."""
    absent = sorted({"chosen", "rejected"} - columns)
    found = {"path": f"no column {' and '.join(f'`{name}`' for name in absent)}"} if absent else {}
    return found if source.input_key is None else found | lacks_prompt(columns, source)


PROMPTS = Shape(prompt_row, lacks_prompt)
ANSWERED_PROMPTS = Shape(answered_prompt_row, lacks_prompt_or_answer)
COMPLETIONS = Shape(completion_row, lacks_completion)


# --- parts of a row --------------------------------------------------------------------------------------------------


def _prompt_column(columns: Set[str], source: DataSource) -> str:
    if source.input_key is not None:
        return source.input_key
    return "messages" if "messages" in columns and "prompt" not in columns else "prompt"


def _prompt(value: Any, column: str) -> tuple[str | Conversation, str | None]:
    """The prompt, and the assistant turn that follows it in a whole conversation (TRL's language modelling shape)."""
    if isinstance(value, str):
        if not value.strip():
            raise BadRow(f"`{column}` is empty")
        return value, None
    if not isinstance(value, list):
        raise BadRow(f"`{column}` must be text or a list of messages, found {_kind(value)}")
    conversation = _conversation(value, column)
    turn = None
    if conversation[-1]["role"] == "assistant" and column != "prompt":
        turn = conversation.pop()["content"]
    if not conversation or conversation[-1]["role"] not in ("user", "tool"):
        raise BadRow(f"the prompt in `{column}` must end with a message of the user")
    if not conversation[-1]["content"].strip():
        raise BadRow(f"the last message of the prompt in `{column}` is empty")
    return conversation, turn


def _conversation(value: list[Any], column: str) -> Conversation:
    if not value:
        raise BadRow(f"`{column}` is an empty list of messages")
    return [_message(item, f"{column}[{index}]") for index, item in enumerate(value)]


def _message(item: Any, place: str) -> Message:
    if not isinstance(item, dict):
        raise BadRow(f"`{place}` must be an object with role and content, found {_kind(item)}")
    message = {name: value for name, value in item.items() if value is not None}  # Arrow fills absent keys with null
    if message.get("role") not in ROLES:
        raise BadRow(f"`{place}.role` must be one of {', '.join(ROLES)}")
    if not isinstance(message.get("content"), str):
        raise BadRow(f"`{place}.content` must be text, found {_kind(message.get('content'))}")
    return message


def _answer(values: dict[str, Any], source: DataSource) -> tuple[str, str | None]:
    """The column that holds the reference answer, and the answer."""
    if source.label_key is not None:
        return source.label_key, _scalar_text(values.get(source.label_key), source.label_key)
    model = values.get("reward_model")
    if isinstance(model, dict) and "ground_truth" in model:
        return "reward_model", _scalar_text(model["ground_truth"], "reward_model.ground_truth")
    return "answer", _scalar_text(values.get("answer"), "answer")


def _scalar_text(value: Any, name: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise BadRow(f"`{name}` must be text, a number or null, found {_kind(value)}")


def _data_source(values: dict[str, Any]) -> str:
    value = values.get("data_source")
    if value is None:
        return ""
    if not isinstance(value, str) or not value.strip():
        raise BadRow("`data_source` is blank or no text; name the source or leave the column out")
    return value


def _completion(value: Any, name: str) -> str:
    if isinstance(value, list):
        if len(value) != 1 or _message(value[0], f"{name}[0]")["role"] != "assistant":
            raise BadRow(f"`{name}` must be one message of the assistant, found {len(value)} messages")
        value = value[0]["content"]
    text = _scalar_text(value, name)
    if text is None or not text.strip():
        raise BadRow(f"`{name}` is missing or empty")
    return text


def _chat_preference(
    prompt: Any, column: str, chosen: list[Any], rejected: list[Any]
) -> tuple[str | Conversation, tuple[str, str]]:
    completions = _completion(chosen[-1:], "chosen"), _completion(rejected[-1:], "rejected")
    shared = chosen[:-1]
    if shared != rejected[:-1]:
        raise BadRow("`chosen` and `rejected` differ before their last message")
    if shared:  # whole conversations hold the prompt themselves, whatever else the row says
        prompt, column = shared, "chosen"
    if isinstance(prompt, str) and prompt.strip():
        prompt = [{"role": "user", "content": prompt}]
    return _prompt(prompt, column)[0], completions


def _shared_beginning(chosen: str, rejected: str) -> tuple[str, tuple[str, str]]:
    """Splits two texts after their common beginning, at the last word border, so that no word is cut in two."""
    size = 0
    while size < min(len(chosen), len(rejected)) and chosen[size] == rejected[size]:
        size += 1
    borders = [match.start() for match in re.finditer(r"\s", chosen[:size])]
    end = borders[-1] if borders else 0
    prompt, completions = chosen[:end], (chosen[end:], rejected[end:])
    if not prompt.strip() or not all(text.strip() for text in completions):
        raise BadRow("`chosen` and `rejected` share no beginning that could be the prompt; add a `prompt` column")
    return prompt, completions


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")


# --- sameness --------------------------------------------------------------------------------------------------------


def content_key(prompt: str | Conversation) -> str:
    """sha256 of what a prompt says: equal for rows that differ only in case, spacing or system message.

    Spaces between two words count as one; spaces beside punctuation do not count (`2 + 2 ?` is `2+2?`).
    """
    texts = [prompt] if isinstance(prompt, str) else [turn["content"] for turn in prompt if turn["role"] != "system"]
    return hashlib.sha256("\x1e".join(normalised(text) for text in texts).encode("utf-8")).hexdigest()


def normalised(text: str) -> str:
    """The text without case, without spaces beside punctuation, with one space between words."""
    return re.sub(r" (?=\W)|(?<=\W) ", "", " ".join(text.casefold().split()))
