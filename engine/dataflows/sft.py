"""Supervised fine-tuning: makes the start checkpoint from prompt and completion rows."""

from collections.abc import Callable, Sequence

import torch

from engine.batch import Batch
from engine.config import SFTConfig
from engine.controller.group import WorkerGroup
from engine.data.completions import Example
from engine.metrics import Metrics
from engine.seeds import stream_rows
from engine.workers.policy import PolicyWorker


def fine_tune(
    policy: WorkerGroup,
    examples: Sequence[Example],
    config: SFTConfig,
    seed: int,
    report: Callable[[int, Metrics], None],
) -> Metrics:
    """config.steps supervised steps over a seeded stream of epochs; report(step, metrics) after each one.

    Returns the last metrics.
    """
    metrics = Metrics()
    for step in range(config.steps):
        rows = stream_rows(len(examples), config.batch_size, step, seed, "sft")
        batch = as_batch([examples[row] for row in rows])
        metrics = policy.call(PolicyWorker.update_sft, batch, float(batch.response_mask.sum()))
        report(step + 1, metrics)
    return metrics


def as_batch(examples: Sequence[Example]) -> Batch:
    """Prompt and completion as prompt and response, masks from the recorded lengths."""
    lengths = torch.tensor([len(example.input_ids) for example in examples])
    prompts = torch.tensor([example.prompt_length for example in examples])
    input_ids = torch.zeros(len(examples), int(lengths.max()), dtype=torch.int64)
    for row, example in enumerate(examples):
        input_ids[row, : len(example.input_ids)] = torch.tensor(example.input_ids)
    responses = lengths - prompts
    return Batch(
        {
            "input_ids": input_ids,
            "attention_mask": torch.arange(input_ids.shape[1]) < lengths[:, None],
            "prompt_lengths": prompts,
            "response_lengths": responses,
            "response_mask": torch.arange(int(responses.max())) < responses[:, None],
        }
    )
