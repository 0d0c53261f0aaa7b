"""What the dataflows on fixed rows are given: the model that learns, the frozen reference beside it, and rows as batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.batch import Batch
from engine.controller.group import WorkerGroup
from engine.data.completions import Preference
from engine.dataflows.sequences import sequence_batch


@dataclass(frozen=True)
class OfflineRoles:
    """Worker groups by role; the reference is there exactly where the objective compares with the start checkpoint."""

    model: WorkerGroup
    reference: WorkerGroup = None  # type: ignore[assignment]


def pair_batch(pairs: Sequence[Preference]) -> Batch:
    """Two rows for each pair, the chosen completion first; group_ids: the number of the pair."""
    rows = [(pair.prompt_ids, completion) for pair in pairs for completion in (pair.chosen_ids, pair.rejected_ids)]
    batch = sequence_batch([prompt + completion for prompt, completion in rows], [len(prompt) for prompt, _ in rows])
    margins = torch.tensor([pair.margin for pair in pairs]).repeat_interleave(2)
    return batch.with_fields(group_ids=torch.arange(len(pairs)).repeat_interleave(2), margins=margins)
