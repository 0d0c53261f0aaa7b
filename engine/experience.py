"""Experience on disk: tensors as safetensors, texts and scores as Parquet; and prompts as a batch for rollout."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file

from engine.batch import Batch
from engine.data.prepare import Prompt
from engine.seeds import derive

TENSORS = "experience.safetensors"
SAMPLES = "samples.parquet"


def save_experience(batch: Batch, folder: Path) -> None:
    """Write all fields and columns of a batch; read them back with `load_experience`, bit for bit."""
    save_file({name: tensor.contiguous() for name, tensor in batch.fields.items()}, folder / TENSORS)
    columns = {name: [json.dumps(value) for value in values] for name, values in batch.columns.items()}
    if "scores" in batch:
        columns["score"] = [json.dumps(None if score != score else score) for score in batch.scores.tolist()]
    pq.write_table(pa.table(columns), folder / SAMPLES)


def load_experience(folder: Path) -> Batch:
    """The batch that `save_experience` wrote."""
    fields = load_file(folder / TENSORS)
    table = pq.read_table(folder / SAMPLES).to_pydict()
    columns = {name: [json.loads(value) for value in values] for name, values in table.items() if name != "score"}
    return Batch(fields, columns)


def prompt_batch(prompts: Sequence[Prompt], positions: Sequence[int], seed: int, purpose: str) -> Batch:
    """Prompts as rows for a rollout call.

    positions: where each prompt stands in the run's endless stream of prompts: its group id and part of its seed.
    """
    lengths = torch.tensor([len(prompt.input_ids) for prompt in prompts], dtype=torch.int64)
    input_ids = torch.zeros(len(prompts), int(lengths.max()) if len(prompts) else 0, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        input_ids[row, : len(prompt.input_ids)] = torch.tensor(prompt.input_ids)
    seeds = [derive(seed, purpose, position, prompt.index) for position, prompt in zip(positions, prompts, strict=True)]
    fields = {
        "input_ids": input_ids,
        "attention_mask": torch.arange(input_ids.shape[1]) < lengths[:, None],
        "prompt_lengths": lengths,
        "group_ids": torch.tensor(list(positions), dtype=torch.int64),
        "sample_ids": torch.zeros(len(prompts), dtype=torch.int64),
        "prompt_seeds": torch.tensor(seeds, dtype=torch.int64),
    }
    columns: dict[str, list[Any]] = {
        "prompt": [prompt.text for prompt in prompts],
        "answer": [prompt.answer for prompt in prompts],
        "extra": [prompt.extra for prompt in prompts],
    }
    return Batch(fields, columns)
