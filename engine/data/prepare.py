"""From configured sources to templated prompts: the one entry of training, evaluation and `data check`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.config import DataConfig, DataSource, SuiteConfig
from engine.data.encode import encode_rows, limit_prompts
from engine.data.filters import handle_duplicates, hold_out, remove_overlap
from engine.data.fingerprint import rows_fingerprint, tokenizer_fingerprint
from engine.data.gather import Row, Split, gather, settle_bad_lines
from engine.data.report import DataReport, merged
from engine.data.schema import ANSWERED_PROMPTS, PROMPTS, Shape
from engine.data.templating import PromptEncoder
from engine.errors import DataError, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompt:
    """One templated prompt.

    index: position in its split, from 0: the identity that seeds and data order use. input_ids: what every stage feeds
    to a model. text: the rendered prompt, for logs and scorers. source: `data_source` of the row, or "". extra:
    `extra_info` and the row's other columns, plain JSON values. key: the same for prompts that differ only in case and
    spaces.
    """

    index: int
    input_ids: tuple[int, ...]
    text: str
    answer: str | None
    source: str
    extra: dict[str, Any]
    file: str
    line: int
    key: str = ""

    @property
    def place(self) -> str:
        """FILE:LINE"""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Prepared:
    """The prompts of a run, what was found on the way, and the content hashes that go into its digest.

    suites: prompts of the evaluation suites that have data of their own, by suite name.
    fingerprints: "data/train", "data/eval", "data/suite/NAME" and "tokenizer" -> sha256.
    """

    train: list[Prompt]
    eval: list[Prompt]
    report: DataReport
    fingerprints: dict[str, str]
    suites: dict[str, list[Prompt]] = field(default_factory=dict)


def examine(
    data: DataConfig,
    tokenizer: "PreTrainedTokenizerBase | None",
    *,
    needs_answer: bool,
    seed: int,
    suites: Sequence[SuiteConfig] = (),
) -> tuple[Prepared, list[Problem]]:
    """Training, evaluation and suite prompts, and everything that is wrong, in all files; no tokenizer = no ids."""
    encoder = None if tokenizer is None else PromptEncoder(tokenizer, data.system_prompt)
    shape = ANSWERED_PROMPTS if needs_answer else PROMPTS
    train = load_split(data.train, data, encoder, "data.train", shape)
    held_out = {"data/eval": load_split(data.eval, data, encoder, "data.eval", shape)} if data.eval else {}
    for index, suite in enumerate(suites):
        if suite.data:
            key = f"evaluation.suites[{index}].data"
            held_out[f"data/suite/{suite.name}"] = load_split(suite.data, data, encoder, key, shape)
    for split in held_out.values():
        remove_overlap(train, split.rows, split.key, allowed=data.overlap == "drop")
    fingerprints = {"data/train": train.fingerprint} | {name: split.fingerprint for name, split in held_out.items()}
    if data.eval:
        evaluation = held_out["data/eval"].rows
    else:
        evaluation = hold_out(train, data.eval_fraction, seed)
        fingerprints["data/eval"] = rows_fingerprint(row.digest for row in evaluation)
    if tokenizer is not None:
        fingerprints["tokenizer"] = tokenizer_fingerprint(tokenizer)
    prepared = Prepared(
        _prompts(train.rows),
        _prompts(evaluation),
        merged(split.report for split in (train, *held_out.values())),
        fingerprints,
        _suite_prompts(held_out),
    )
    return prepared, _all_problems(data, (train, *held_out.values()), [*train.rows, *evaluation])


def load_split(
    sources: Sequence[DataSource], data: DataConfig, encoder: PromptEncoder | None, key: str, shape: Shape
) -> Split:
    """Read, recognise, encode and filter one list of sources; problems are collected in the split."""
    split = gather(tuple(sources), key, shape)
    if encoder is not None:
        encode_rows(split, encoder)
    settle_bad_lines(split, data)
    if encoder is not None:
        limit_prompts(split, encoder, data)
    handle_duplicates(split, drop=data.duplicates == "drop")
    return split


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raise one DataError that lists them all, if there are any."""
    if problems:
        raise DataError("the data cannot be used as configured:", problems=list(problems))


def _all_problems(data: DataConfig, splits: Sequence[Split], rows: Iterable[Row]) -> list[Problem]:
    for split in splits:
        split.require_rows()
    problems = [problem for split in splits for problem in split.problems]
    if data.system_prompt is not None and not problems and all(isinstance(row.content.prompt, str) for row in rows):
        remedy = "no row is a conversation, so it would never be used; remove it, or give rows as messages"
        problems.append(Problem("data.system_prompt", data.system_prompt, remedy))
    return problems


def _suite_prompts(held_out: Mapping[str, Split]) -> dict[str, list[Prompt]]:
    prefix = "data/suite/"
    named = {name.removeprefix(prefix): split for name, split in held_out.items() if name.startswith(prefix)}
    return {name: _prompts(split.rows) for name, split in named.items()}


def _prompts(rows: Sequence[Row]) -> list[Prompt]:
    return [_prompt(index, row) for index, row in enumerate(rows)]


def _prompt(index: int, row: Row) -> Prompt:
    content = row.content
    return Prompt(index, row.ids, row.text, content.answer, content.source, content.extra, row.file, row.line, row.key)
