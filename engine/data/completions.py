"""Rows with something to learn by heart: SFT examples and preference pairs, with the prompt ids that rollout uses."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from engine.config import DataConfig, DataSource
from engine.data.filters import remove_overlap
from engine.data.gather import Row, Split
from engine.data.prepare import Prompt, load_split, raise_problems
from engine.data.report import DataReport
from engine.data.schema import COMPLETIONS, PREFERENCES, Shape
from engine.data.templating import PromptEncoder
from engine.errors import Problem, ShapeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # label of a position that no loss counts


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


class Padded(NamedTuple):
    """One example at a fixed width: ids, labels (-100 = not counted) and attention mask (1 = real token)."""

    input_ids: list[int]
    labels: list[int]
    attention_mask: list[int]


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
    split = _load(sources, data, tokenizer, max_tokens, held_out, split_name, COMPLETIONS)
    return [Example(row.ids + row.targets[0], len(row.ids)) for row in split.rows], split.report


def prepare_preferences(
    sources: Sequence[DataSource],
    data: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_tokens: int,
    held_out: Sequence[Prompt] = (),
    split_name: str = "preferences",
) -> tuple[list[Preference], DataReport]:
    """Preference pairs, prompt and completion together at most `max_tokens` ids; otherwise as `prepare_sft`."""
    split = _load(sources, data, tokenizer, max_tokens, held_out, split_name, PREFERENCES)
    return [Preference(row.ids, row.targets[0], row.targets[1]) for row in split.rows], split.report


def labels_and_attention(example: Example, width: int, pad_id: int, side: Literal["left", "right"] = "right") -> Padded:
    """The example padded to `width`; labels and mask come from its lengths, so a pad id that is also EOS does no harm.

    Raises ShapeError if the example is longer than the width.
    """
    length = len(example.input_ids)
    if length > width:
        raise ShapeError(f"an example of {length} tokens does not fit into a width of {width}")
    labels = [IGNORED] * example.prompt_length + list(example.input_ids[example.prompt_length :])
    padding = width - length
    parts = ((list(example.input_ids), pad_id), (labels, IGNORED), ([1] * length, 0))
    if side == "right":
        return Padded(*(values + [filler] * padding for values, filler in parts))
    return Padded(*([filler] * padding + values for values, filler in parts))


def _load(
    sources: Sequence[DataSource],
    data: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    max_tokens: int,
    held_out: Sequence[Prompt],
    key: str,
    shape: Shape,
) -> Split:
    split = load_split(sources, data, PromptEncoder(tokenizer, data.system_prompt), key, shape)
    own_files = {source.path for source in sources}
    # Rows held out of these very files are no mistake of the user; rows of an evaluation file are what overlap decides.
    remove_overlap(split, [row for row in held_out if row.file in own_files], key, allowed=True)
    remove_overlap(split, [row for row in held_out if row.file not in own_files], key, allowed=data.overlap == "drop")
    _limit_completions(split, max_tokens)
    split.require_rows()
    raise_problems(split.problems)
    return split


def _limit_completions(split: Split, max_tokens: int) -> None:
    before = len(split.rows)
    rows: list[Row] = []
    for row in split.rows:
        room = max(0, max_tokens - len(row.ids))
        targets = tuple(ids[:room] for ids in row.targets)
        if room == 0 or len(set(targets)) < len(targets):
            split.report.without_labels += 1
            split.drop(row, f"nothing to learn is left below {max_tokens} tokens: the prompt has {len(row.ids)}")
            continue
        split.report.truncated += targets != row.targets
        rows.append(replace(row, targets=targets))
    split.rows = rows
    if before and not rows:
        remedy = f"no row keeps a token to learn below {max_tokens} tokens; raise the limit or shorten the prompts"
        split.problems.append(Problem(split.key, f"{before} rows", remedy))
