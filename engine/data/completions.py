"""Rows with something to learn by heart: SFT examples and preference pairs, with the prompt ids that rollout uses."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.config import DataConfig, DataSource
from engine.data.filters import remove_overlap
from engine.data.gather import Row, Split
from engine.data.prepare import Prompt, load_split, raise_problems
from engine.data.report import DataReport
from engine.data.schema import COMPLETIONS
from engine.data.templating import PromptEncoder
from engine.errors import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Example:
    """Prompt and completion for SFT; the labels are the ids from `prompt_length` on (at least one)."""

    input_ids: tuple[int, ...]
    prompt_length: int


@dataclass(frozen=True)
class Preference:
    """One prompt with the better and the worse completion; each completion ends with EOS unless it was cut."""

    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    margin: float = 0.0  # reward units by which the better one leads at least
    chosen_is_safe: bool | None = None  # None = not labelled
    rejected_is_safe: bool | None = None


def prepare_sft(
    sources: Sequence[DataSource],
    data: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_tokens: int,
    held_out: Sequence[Prompt] = (),
    split_name: str = "sft.data",
) -> tuple[list[Example], DataReport]:
    """Examples of at most `max_tokens` ids.

    Completions are cut there; rows that keep no token to learn are dropped and counted. held_out: evaluation prompts,
    which never stay among the examples. Raises DataError with all problems, also if no example is left.
    """
    split = load_split(sources, data, PromptEncoder(tokenizer, data.system_prompt), split_name, COMPLETIONS)
    own_files = {source.path for source in sources}
    # Rows held out of these very files are no mistake of the user; rows of an evaluation file are what overlap decides.
    own = [row for row in held_out if row.file in own_files]
    others = [row for row in held_out if row.file not in own_files]
    remove_overlap(split, own, split_name, allowed=True)
    remove_overlap(split, others, split_name, allowed=data.overlap == "drop")
    limit_completions(split, max_tokens)
    split.require_rows()
    raise_problems(split.problems)
    return [Example(row.ids + row.targets[0], len(row.ids)) for row in split.rows], split.report


def limit_completions(split: Split, max_tokens: int) -> None:
    """Cut completions so that prompt and completion have at most `max_tokens` ids.

    Rows that keep nothing to learn, and pairs that are the same below the limit, are dropped and counted; a split of
    which no row is left has a problem.
    """
    before = len(split.rows)
    rows: list[Row] = []
    for row in split.rows:
        room = max(0, max_tokens - len(row.ids))
        targets = tuple(ids[:room] for ids in row.targets)
        if not all(targets):
            split.report.without_labels += 1
            split.drop(row, f"nothing to learn is left below {max_tokens} tokens: the prompt has {len(row.ids)}")
            continue
        if len(set(targets)) < len(targets):
            split.report.identical += 1
            split.drop(row, f"both completions are the same below {max_tokens} tokens: the prompt has {len(row.ids)}")
            continue
        split.report.truncated += targets != row.targets
        rows.append(replace(row, targets=targets))
    split.rows = rows
    if before and not rows:
        remedy = f"no row keeps a token to learn below {max_tokens} tokens; raise the limit or shorten the prompts"
        split.problems.append(Problem(split.key, f"{before} rows", remedy))
