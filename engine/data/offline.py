"""From configured sources to the rows of a run that learns from files alone: examples for sft, pairs for all others."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.config import DataSource
from engine.data.completions import Example, Preference, limit_completions
from engine.data.filters import hold_out, remove_overlap
from engine.data.fingerprint import rows_fingerprint, tokenizer_fingerprint
from engine.data.gather import Row, Split
from engine.data.preferences import HARM, HELPFULNESS, MARGINS
from engine.data.prepare import load_split
from engine.data.report import DataReport, merged
from engine.data.schema import COMPLETIONS, Shape
from engine.data.templating import PromptEncoder
from engine.errors import Problem
from engine.offlineconfig import OfflineConfig, RewardModelObjective, SFTObjective

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Rows = list[Example] | list[Preference]


@dataclass(frozen=True)
class OfflineRows:
    """The rows of a run, what was found on the way, and the content hashes that go into its digest.

    fingerprints: "data/train", "data/eval" and "tokenizer" -> sha256.
    """

    train: Rows
    eval: Rows
    report: DataReport
    fingerprints: dict[str, str]


def examine_offline(
    config: OfflineConfig, tokenizer: "PreTrainedTokenizerBase | None"
) -> tuple[OfflineRows, list[Problem]]:
    """Training and held-out rows, and everything that is wrong in all files; no tokenizer = nothing about lengths."""
    data = config.data
    encoder = None if tokenizer is None else PromptEncoder(tokenizer, data.system_prompt)
    shape = shape_of(config)

    def load(sources: Sequence[DataSource], key: str) -> Split:
        return load_split(sources, data, encoder, key, shape)

    train = load(data.train, "data.train")
    held_out = load(data.eval, "data.eval") if data.eval else None
    fingerprints = {"data/train": train.fingerprint}
    if held_out is None:
        evaluation = Split("data.eval", rows=hold_out(train, data.eval_fraction, config.seed))
        evaluation.report.files, evaluation.bad = train.report.files, train.bad  # what is dropped of them stands there
        fingerprints["data/eval"] = rows_fingerprint(row.digest for row in evaluation.rows)
    else:
        evaluation = held_out
        remove_overlap(train, evaluation.rows, "data.eval", allowed=data.overlap == "drop")
        fingerprints["data/eval"] = evaluation.fingerprint
    if tokenizer is not None:
        fingerprints["tokenizer"] = tokenizer_fingerprint(tokenizer)
        limit_completions(train, data.max_tokens)
        limit_completions(evaluation, data.max_tokens)
    splits = [train, evaluation]
    for split in (train, held_out):
        if split is not None:
            split.require_rows()
    report = _report(train, evaluation, own_files=held_out is not None)
    rows = OfflineRows(_rows(config, train.rows), _rows(config, evaluation.rows), report, fingerprints)
    return rows, [problem for split in splits for problem in split.problems]


def shape_of(config: OfflineConfig) -> Shape:
    """What the objective needs of every row."""
    match config.objective:
        case SFTObjective():
            return COMPLETIONS
        case RewardModelObjective(margin="data"):
            return MARGINS
        case objective:
            return HARM if objective.name == "cost_model" else HELPFULNESS


def _report(train: Split, evaluation: Split, *, own_files: bool) -> DataReport:
    """One report; rows held out of the training files are counted with these."""
    if own_files:
        return merged([train.report, evaluation.report])
    total = merged([train.report])
    total.truncated += evaluation.report.truncated
    total.without_labels += evaluation.report.without_labels
    total.identical += evaluation.report.identical
    return total


def _rows(config: OfflineConfig, rows: Sequence[Row]) -> Rows:
    if isinstance(config.objective, SFTObjective):
        return [Example(row.ids + row.targets[0], len(row.ids)) for row in rows if row.targets]
    return [_pair(row) for row in rows if row.targets]


def _pair(row: Row) -> Preference:
    extra = row.content.extra
    return Preference(
        row.ids,
        row.targets[0],
        row.targets[1],
        margin=extra.get("margin", 0.0),
        chosen_is_safe=extra.get("is_chosen_safe"),
        rejected_is_safe=extra.get("is_rejected_safe"),
    )
