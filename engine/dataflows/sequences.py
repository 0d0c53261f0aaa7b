"""Prompts and completions of fixed rows as a batch, masks from the recorded lengths."""

from collections.abc import Sequence

import torch

from engine.batch import Batch


def sequence_batch(sequences: Sequence[tuple[int, ...]], prompt_lengths: Sequence[int]) -> Batch:
    """Rows of prompt and response; sequences: the ids of both."""
    lengths = torch.tensor([len(ids) for ids in sequences])
    prompts = torch.tensor(prompt_lengths)
    input_ids = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.int64)
    for row, ids in enumerate(sequences):
        input_ids[row, : len(ids)] = torch.tensor(ids)
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
