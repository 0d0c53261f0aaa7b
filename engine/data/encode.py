"""Gives the rows of a split their ids and applies the prompt limit to exactly those ids."""

from dataclasses import replace

from engine.config import DataConfig
from engine.data.gather import Row, Split
from engine.data.report import line_problems
from engine.data.rows import LineProblem
from engine.data.templating import Ids, PromptEncoder, PromptRefused
from engine.errors import Problem


def encode_rows(split: Split, encoder: PromptEncoder) -> None:
    """Fill text, ids and completion ids of every row; rows that cannot be rendered count as bad lines."""
    if not encoder.has_template and not _all_plain(split, encoder):
        return
    rendered: list[tuple[Row, str]] = []
    for row in split.rows:
        try:
            rendered.append((row, encoder.render(row.content.prompt)))
        except PromptRefused as error:
            split.reject(row, str(error))
    split.rows = []
    for row, text, ids in _encoded(rendered, split, encoder):
        if len(ids) == len(encoder.prefix):
            split.reject(row, "the tokenizer has no token for any of the prompt's text")
            continue
        try:
            targets = tuple(
                encoder.encode_completion(row.content.prompt, text, ids, completion)
                for completion in row.content.completions
            )
        except PromptRefused as error:
            split.reject(row, str(error))
        else:
            split.rows.append(replace(row, text=text, ids=ids, targets=targets))


def _encoded(rendered: list[tuple[Row, str]], split: Split, encoder: PromptEncoder) -> list[tuple[Row, str, Ids]]:
    """Rows with their text and ids; if the tokenizer refuses any of them, all are tried one by one."""
    try:
        ids = encoder.encode([text for _, text in rendered])
    except PromptRefused:
        return [found for row, text in rendered if (found := _encoded_alone(row, text, split, encoder))]
    return [(row, text, own) for (row, text), own in zip(rendered, ids, strict=True)]


def _encoded_alone(row: Row, text: str, split: Split, encoder: PromptEncoder) -> tuple[Row, str, Ids] | None:
    try:
        return row, text, encoder.encode([text])[0]
    except PromptRefused as error:
        split.reject(row, str(error))
        return None


def _all_plain(split: Split, encoder: PromptEncoder) -> bool:
    """Whether no row needs a chat template; else adds the problem that there is none."""
    for row in split.rows:
        if not isinstance(row.content.prompt, str):
            remedy = (
                f"the tokenizer in {encoder.tokenizer.name_or_path} has no chat template, "
                f"and {row.file}, line {row.line} holds messages; "
                "set model.chat_template to the text of a Jinja template, or give plain prompts"
            )
            split.problems.append(Problem("model.chat_template", None, remedy))
            return False
    return True


def limit_prompts(split: Split, encoder: PromptEncoder, data: DataConfig) -> None:
    """Apply `data.max_prompt_tokens` and `data.overlong`; no row over the limit is left."""
    limit = data.max_prompt_tokens
    split.report.prompt_lengths = [len(row.ids) for row in split.rows if row.ids]
    overlong = [row for row in split.rows if len(row.ids) > limit]
    if overlong and data.overlong == "keep_end":
        _keep_ends(split, encoder, limit)
        return
    split.rows = [row for row in split.rows if len(row.ids) <= limit]
    for row in overlong:
        split.drop(row, _too_long(row, limit))
    if data.overlong == "error":
        for origin, report in enumerate(split.report.files):
            lines = [LineProblem(row.line, _too_long(row, limit)) for row in overlong if row.origin == origin]
            if lines:
                remedy = "raise data.max_prompt_tokens, or set data.overlong to filter or keep_end"
                split.problems += line_problems(f"{split.key}[{origin}]", report.path, lines, remedy)


def _too_long(row: Row, limit: int) -> str:
    return f"the prompt has {len(row.ids)} tokens, data.max_prompt_tokens is {limit}"


def _keep_ends(split: Split, encoder: PromptEncoder, limit: int) -> None:
    """Cut prompts at their beginning; a limit that would cut into the generation prompt is a problem instead."""
    opening = _generation_prompt(split, encoder)
    needed = len(encoder.prefix) + 1 + len(opening)
    if limit < needed:
        remedy = f"overlong: keep_end needs at least {needed}: the generation prompt and one token of the prompt"
        split.problems.append(Problem("data.max_prompt_tokens", limit, remedy))
        return
    split.rows = [_cut(row, encoder, limit) if len(row.ids) > limit else row for row in split.rows]


def _cut(row: Row, encoder: PromptEncoder, limit: int) -> Row:
    ids = encoder.keep_end(row.ids, limit)
    return replace(row, ids=ids, text=encoder.decode(ids))


def _generation_prompt(split: Split, encoder: PromptEncoder) -> tuple[int, ...]:
    """What the template adds to open the answer (the same for every conversation); empty for plain prompts."""
    for row in split.rows:
        if not isinstance(row.content.prompt, str):
            return encoder.generation_prompt(row.content.prompt)
    return ()
