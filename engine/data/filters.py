"""Keeps rows from counting twice: duplicates inside a split, and evaluation rows inside the training data."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Protocol

from engine.data.gather import Row, Split
from engine.data.report import SHOWN, Overlap
from engine.data.schema import Content, normalised
from engine.errors import Problem


class HeldOut(Protocol):
    """A row that must not be trained on."""

    @property
    def key(self) -> str: ...
    @property
    def place(self) -> str: ...


def handle_duplicates(split: Split, *, drop: bool) -> None:
    """Count rows with the same prompt and the same answer or completions as an earlier one, and drop them if asked."""
    first: dict[tuple[str, ...], Row] = {}
    kept: list[Row] = []
    for row in split.rows:
        key = (row.key, *_labels(row.content))
        earlier = first.setdefault(key, row)
        if earlier is not row:
            split.report.duplicates += 1
            if drop:
                split.drop(row, f"repeats {earlier.place}")
                continue
        kept.append(row)
    split.rows = kept


def _labels(content: Content) -> tuple[str, ...]:
    labels = content.completions or ("" if content.answer is None else content.answer,)
    return tuple(normalised(label) for label in labels)


def remove_overlap(train: Split, held_out: Iterable[HeldOut], key: str, *, allowed: bool) -> None:
    """Take evaluation rows out of the training rows; a problem of `key` unless dropping them is allowed."""
    places = {row.key: row.place for row in held_out}
    both = [row for row in train.rows if row.key in places]
    for row in both:
        train.drop(row, f"is also the evaluation row {places[row.key]}")
    train.rows = [row for row in train.rows if row.key not in places]
    pairs = [Overlap(row.place, places[row.key]) for row in both]
    train.report.overlap += pairs
    if pairs and not allowed:
        train.problems.append(_overlap_problem(key, pairs))


def _overlap_problem(key: str, pairs: Sequence[Overlap]) -> Problem:
    shown = ", ".join(f"{pair.train} = {pair.eval}" for pair in pairs[:SHOWN])
    more = f" and {len(pairs) - SHOWN} more" if len(pairs) > SHOWN else ""
    remedy = f"rows are also training rows: {shown}{more}. Remove them from one side, or set data.overlap: drop"
    return Problem(key, f"{len(pairs)} overlaps", remedy)


def hold_out(train: Split, fraction: float, seed: int) -> list[Row]:
    """Move a share of the prompts (at least one) out of the training rows and return them, in the order of the file.

    Which ones depends on the seed and on what the prompts say, not on their order. Prompts that say the same are never
    on both sides: the first becomes the evaluation row, the others leave the training rows.
    """
    first: dict[str, Row] = {}
    for row in train.rows:
        first.setdefault(row.key, row)
    if len(first) < 2:
        if train.rows and not train.problems:
            remedy = "fewer than 2, so no evaluation row can be held out; give data.eval or more rows"
            train.problems.append(Problem("data.eval", f"{len(first)} different prompts in {train.key}", remedy))
        return []
    size = min(max(1, round(fraction * len(first))), len(first) - 1)
    chosen = {key: first[key] for key in sorted(first, key=lambda key: _draw(seed, key))[:size]}
    for row in train.rows:
        if row.key in chosen and chosen[row.key] is not row:
            train.drop(row, f"says the same as the held-out row {chosen[row.key].place}")
    train.rows = [row for row in train.rows if row.key not in chosen]
    return [row for row in first.values() if row.key in chosen]


def _draw(seed: int, key: str) -> str:
    return hashlib.sha256(f"{seed}:held-out:{key}".encode()).hexdigest()
