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
from engine.config import RunConfig
from engine.data.prepare import Prompt
from engine.seeds import derive, stream_rows
from engine.unscored import FILE, write_unscored
from engine.writing import writing

TENSORS = "experience.safetensors"
SAMPLES = "samples.parquet"


def save_experience(batch: Batch, folder: Path) -> None:
    """Write all fields and columns of a batch; read them back with `load_experience`, bit for bit.

    Samples that a component could not score are also listed in unscored.jsonl, for people to read.
    """
    with writing(folder / TENSORS):
        save_file({name: tensor.contiguous() for name, tensor in batch.fields.items()}, folder / TENSORS)
    columns = {name: [json.dumps(value) for value in values] for name, values in batch.columns.items()}
    if "scores" in batch:
        columns["score"] = [json.dumps(None if score != score else score) for score in batch.scores.tolist()]
    with writing(folder / SAMPLES):
        pq.write_table(pa.table(columns), folder / SAMPLES)
    if "unscored" in batch:
        write_unscored(batch, folder / FILE)


def load_experience(folder: Path) -> Batch:
    """The batch that `save_experience` wrote."""
    fields = load_file(folder / TENSORS)
    table = pq.read_table(folder / SAMPLES).to_pydict()
    columns = {name: [json.loads(value) for value in values] for name, values in table.items() if name != "score"}
    return Batch(fields, columns)


def drawn_prompts(prompts: Sequence[Prompt], config: RunConfig, iteration: int) -> Batch:
    """The prompts of an iteration, of every draw that the algorithm may make of them.

    Those after the first draw come from a stream of their own, so that an epoch has every row whether or not they are
    used; they stand behind all first draws.
    """
    size, refills = config.train.prompts_per_iteration, config.algorithm.rounds - 1
    rows = stream_rows(len(prompts), size, iteration - 1, config.seed, "prompts")
    rows += stream_rows(len(prompts), size * refills, iteration - 1, config.seed, "refills")
    behind = (config.iterations + (iteration - 1) * refills) * size
    positions = [*range((iteration - 1) * size, iteration * size), *range(behind, behind + size * refills)]
    return prompt_batch([prompts[row] for row in rows], positions, config.seed, "rollout")


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
