"""Batch: named fields with declared shape and dtype for B samples, plus text columns; what travels between roles.

Axes: B samples, T = prompt + response tokens, R response tokens. Sequences are right padded; padding is 0 or False.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.errors import ShapeError


@dataclass(frozen=True)
class Field:
    """Declared axes and dtype of one field."""

    axes: tuple[str, ...]
    dtype: torch.dtype


_PER_SAMPLE_INT = Field(("B",), torch.int64)
_PER_SAMPLE_FLOAT = Field(("B",), torch.float32)
_PER_TOKEN_FLOAT = Field(("B", "R"), torch.float32)

FIELDS: dict[str, Field] = {
    "input_ids": Field(("B", "T"), torch.int64),  # prompt, then response, then padding
    "attention_mask": Field(("B", "T"), torch.bool),
    "prompt_lengths": _PER_SAMPLE_INT,
    "response_lengths": _PER_SAMPLE_INT,
    "response_mask": Field(("B", "R"), torch.bool),
    "rollout_logprobs": _PER_TOKEN_FLOAT,
    "old_logprobs": _PER_TOKEN_FLOAT,
    "ref_logprobs": _PER_TOKEN_FLOAT,
    "logprobs": _PER_TOKEN_FLOAT,
    "values": _PER_TOKEN_FLOAT,
    "bootstrap_values": _PER_SAMPLE_FLOAT,  # value after the last token of a response cut by length; NaN = ended
    "returns": _PER_TOKEN_FLOAT,
    "cost_values": _PER_TOKEN_FLOAT,
    "cost_bootstrap_values": _PER_SAMPLE_FLOAT,
    "cost_returns": _PER_TOKEN_FLOAT,
    "advantages": _PER_TOKEN_FLOAT,
    "token_rewards": _PER_TOKEN_FLOAT,
    "rollout_weights": _PER_TOKEN_FLOAT,
    "scores": _PER_SAMPLE_FLOAT,  # NaN = unscored
    "costs": _PER_SAMPLE_FLOAT,  # NaN = unscored, positive = harmful
    "greedy_scores": _PER_SAMPLE_FLOAT,  # of the greedy response to the same prompt
    "draws": _PER_SAMPLE_INT,  # dynamic sampling: how often prompts were drawn until the sample was made, from 1
    "margins": _PER_SAMPLE_FLOAT,  # of a pair, the same on both of its rows
    "is_unsafe": Field(("B",), torch.bool),
    "group_ids": _PER_SAMPLE_INT,  # same id = same prompt occurrence
    "sample_ids": _PER_SAMPLE_INT,  # position within the group
    "prompt_seeds": _PER_SAMPLE_INT,
    "finish_reason": Field(("B",), torch.int8),  # 0 stop, 1 length
    "policy_version": _PER_SAMPLE_INT,
    "mini_batch": _PER_SAMPLE_INT,  # optimiser step of an epoch that learns from the sample
}


class Resolvable(Protocol):
    """A result that may still be on its way, such as a controller's Pending."""

    def result(self) -> Any: ...


class Batch:
    """Immutable set of fields of equal B; construction checks names, dtypes and shapes.

    fields: name -> tensor, names and types of FIELDS; columns: name -> one JSON-able value per sample (texts, answers).
    Raises ShapeError naming the field, what was expected and what was found.
    """

    __slots__ = ("_columns", "_fields", "_size")

    def __init__(self, fields: Mapping[str, Tensor], columns: Mapping[str, Sequence[Any]] | None = None) -> None:
        self._fields = dict(fields)
        self._columns = {name: tuple(values) for name, values in (columns or {}).items()}
        self._size = _check(self._fields, self._columns)

    def __len__(self) -> int:
        return self._size

    def __contains__(self, name: str) -> bool:
        return name in self._fields or name in self._columns

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._fields[name]
        except KeyError:
            raise AttributeError(f"batch has no field {name!r}; it has {sorted(self._fields)}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return (Batch, (self._fields, self._columns))

    def __repr__(self) -> str:
        shapes = {name: tuple(tensor.shape) for name, tensor in self._fields.items()}
        return f"Batch({self._size} samples, {shapes}, columns {sorted(self._columns)})"

    @property
    def fields(self) -> dict[str, Tensor]:
        """Name -> tensor, a copy of the mapping."""
        return dict(self._fields)

    @property
    def columns(self) -> dict[str, tuple[Any, ...]]:
        """Name -> one value per sample, a copy of the mapping."""
        return dict(self._columns)

    def column(self, name: str) -> tuple[Any, ...]:
        """One text column; ShapeError names what exists."""
        if name not in self._columns:
            raise ShapeError(f"batch has no column {name!r}; it has {sorted(self._columns)}.")
        return self._columns[name]

    def with_fields(self, **fields: Tensor) -> "Batch":
        """A batch with fields added or replaced."""
        return Batch({**self._fields, **fields}, self._columns)

    def with_columns(self, **columns: Sequence[Any]) -> "Batch":
        """A batch with text columns added or replaced."""
        return Batch(self._fields, {**self._columns, **columns})

    def select(self, names: Iterable[str]) -> "Batch":
        """Only these fields and columns; ShapeError if one is missing."""
        wanted = list(names)
        missing = [name for name in wanted if name not in self]
        if missing:
            raise ShapeError(
                f"fields {missing} were asked for; the batch has {sorted(self._fields) + sorted(self._columns)}."
            )
        fields = {name: self._fields[name] for name in wanted if name in self._fields}
        return Batch(fields, {name: self._columns[name] for name in wanted if name in self._columns})

    def merge(self, *others: "Batch | Resolvable") -> "Batch":
        """Fields and columns of all batches, waiting for those still on their way; a name given twice is refused."""
        fields, columns = dict(self._fields), dict(self._columns)
        for other in others:
            batch = other if isinstance(other, Batch) else other.result()
            twice = sorted((fields.keys() & batch._fields.keys()) | (columns.keys() & batch._columns.keys()))
            if twice:
                raise ShapeError(f"merge would overwrite {twice}; use with_fields to replace a field on purpose.")
            fields.update(batch._fields)
            columns.update(batch._columns)
        return Batch(fields, columns)

    def index(self, rows: Tensor | Sequence[int]) -> "Batch":
        """Samples at these positions, in this order."""
        positions = torch.as_tensor(rows)
        if positions.dtype == torch.bool:
            raise ShapeError("index takes positions, not a mask; use mask.nonzero()[:, 0].")
        positions = positions.to(torch.int64)
        fields = {name: tensor[positions] for name, tensor in self._fields.items()}
        order = positions.tolist()
        return Batch(fields, {name: [values[i] for i in order] for name, values in self._columns.items()})

    def repeat(self, times: int) -> "Batch":
        """Every sample `times` times in a row, with its number within the group as `sample_ids`."""
        rows = torch.arange(len(self)).repeat_interleave(times)
        return self.index(rows).with_fields(sample_ids=torch.arange(times).repeat(len(self)))

    def split(self, sizes: Sequence[int]) -> list["Batch"]:
        """Consecutive parts of these sizes, which must add up to len(self)."""
        if sum(sizes) != len(self):
            raise ShapeError(f"split sizes {list(sizes)} add up to {sum(sizes)}; the batch has {len(self)} samples.")
        bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        return [self.index(torch.arange(start, stop)) for start, stop in pairwise(bounds)]

    def lengths(self) -> Tensor:
        """[B] int64: real tokens per sample."""
        if "response_lengths" in self:
            return self.prompt_lengths + self.response_lengths
        return self.prompt_lengths

    def trim(self) -> "Batch":
        """The same samples without columns of padding that none of them needs."""
        width = int(self.lengths().max()) if len(self) else 0
        responses = int(self.response_lengths.max()) if len(self) and "response_lengths" in self else 0
        keep = {"T": width, "R": responses}
        fields = {
            name: tensor[:, : keep[FIELDS[name].axes[1]]].contiguous() if len(FIELDS[name].axes) == 2 else tensor
            for name, tensor in self._fields.items()
        }
        return Batch(fields, self._columns)

    def to(self, device: torch.device) -> "Batch":
        """The same batch with its tensors on `device`."""
        return Batch({name: tensor.to(device) for name, tensor in self._fields.items()}, self._columns)


def concat(batches: Sequence[Batch]) -> Batch:
    """All samples in order, T and R padded to the widest part. Raises ShapeError if the parts hold different fields."""
    if not batches:
        raise ShapeError("concat of no batches: nothing says which fields there are.")
    names, columns = batches[0].fields.keys(), batches[0].columns.keys()
    for number, batch in enumerate(batches):
        if batch.fields.keys() != names or batch.columns.keys() != columns:
            raise ShapeError(f"part {number} has {batch!r}; part 0 has {batches[0]!r}.")
    fields = {name: _concat_field([batch.fields[name] for batch in batches]) for name in names}
    return Batch(fields, {name: [value for batch in batches for value in batch.columns[name]] for name in columns})


def _concat_field(tensors: list[Tensor]) -> Tensor:
    if tensors[0].dim() == 1:
        return torch.cat(tensors)
    width = max(tensor.shape[1] for tensor in tensors)
    return torch.cat([torch.nn.functional.pad(tensor, (0, width - tensor.shape[1])) for tensor in tensors])


def micro_batches(batch: Batch, max_tokens: int) -> Iterator[tuple[Tensor, Batch]]:
    """Parts of at most max_tokens tokens (padding included) with little padding: (rows [b] int64, trimmed part).

    Samples are sorted by length; a sample longer than max_tokens is a part of its own. Use `restore` on outputs.
    """
    lengths = batch.lengths()
    order = torch.argsort(lengths, descending=True, stable=True).tolist()
    start = 0
    while start < len(order):
        longest = max(int(lengths[order[start]]), 1)
        rows = torch.tensor(order[start : start + max(max_tokens // longest, 1)])
        yield rows, batch.index(rows).trim()
        start += len(rows)


def restore(parts: Sequence[tuple[Tensor, Tensor]], shape: tuple[int, ...]) -> Tensor:
    """Micro-batch outputs back in the batch's order and width: (rows [b], output [b] or [b, r]) -> [B] or [B, R]."""
    if not parts:
        return torch.zeros(shape)
    result = torch.zeros(shape, dtype=parts[0][1].dtype)
    for rows, output in parts:
        if output.dim() == 1:
            result[rows] = output
        else:
            result[rows, : output.shape[1]] = output
    return result


def response_positions(batch: Batch) -> Tensor:
    """[B, R] int64: position in [0, T) whose output predicts each response token (clamped to T - 1 where masked)."""
    offsets = torch.arange(batch.response_mask.shape[1], device=batch.prompt_lengths.device)
    positions = batch.prompt_lengths[:, None] + offsets - 1
    return positions.clamp(min=0, max=max(batch.input_ids.shape[1] - 1, 0))


def response_ids(batch: Batch) -> Tensor:
    """[B, R] int64: the response tokens, 0 where masked."""
    positions = (response_positions(batch) + 1).clamp(max=max(batch.input_ids.shape[1] - 1, 0))
    return torch.where(batch.response_mask, batch.input_ids.gather(1, positions), 0)


def _check(fields: Mapping[str, Tensor], columns: Mapping[str, Sequence[Any]]) -> int:
    sizes: dict[str, dict[int, str]] = {}
    for name, tensor in fields.items():
        if name not in FIELDS:
            raise ShapeError(f"{name!r} is not a declared batch field. Declare it in engine/batch.py: FIELDS.")
        declared = FIELDS[name]
        if tensor.dtype != declared.dtype or tensor.dim() != len(declared.axes):
            raise ShapeError(
                f"field {name!r} must be {list(declared.axes)} {declared.dtype}; "
                f"found {list(tensor.shape)} {tensor.dtype}."
            )
        for axis, size in zip(declared.axes, tensor.shape, strict=True):
            sizes.setdefault(axis, {})[size] = name
    for name, values in columns.items():
        sizes.setdefault("B", {})[len(values)] = name
    for axis, found in sizes.items():
        if len(found) > 1:
            raise ShapeError(
                f"axis {axis} has several sizes: {', '.join(f'{n} in {name!r}' for n, name in found.items())}."
            )
    return next(iter(sizes.get("B", {0: ""})))
