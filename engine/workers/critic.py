"""Critic: predicts the reward still to come at every response token (PPO)."""

import torch
from torch import Tensor

from engine.algorithms.losses import LossOutput, value_loss
from engine.batch import Batch, response_positions
from engine.config import CriticConfig
from engine.controller.dispatch import ROWS, ROWS_TO_FIRST, dispatch
from engine.metrics import Metrics, merge
from engine.workers.trained import SEQUENCE, TrainedWorker


class CriticWorker(TrainedWorker):
    """One rank of the critic: the policy's body with a scalar head."""

    head = "value"

    @dispatch(ROWS, reads=(*SEQUENCE, "finish_reason"))
    def compute_values(self, batch: Batch) -> Batch:
        """values [B, R]: expected reward before each response token; bootstrap_values [B]: after the last token of a
        response that was cut by length, NaN where the response ended by itself."""
        width = batch.response_mask.shape[1]
        both = self._score(batch, _values_and_last, (len(batch), width + 1))
        cut = (batch.finish_reason == 1) & (batch.response_lengths > 0)
        return Batch({"values": both[:, 1:].contiguous(), "bootstrap_values": torch.where(cut, both[:, 0], torch.nan)})

    @dispatch(ROWS_TO_FIRST, reads=(*SEQUENCE, "values", "returns", "mini_batch"))
    def update(self, batch: Batch, normalizers: list[float]) -> Metrics:
        """All optimiser steps of one iteration; normalizers: response tokens of each mini-batch over all ranks.

        Metrics under value/ and critic/ (gradient norm and rate).
        """
        return merge(self._learn(batch, self._value_loss, normalizers)).renamed({"train/": "critic/"})

    def _value_loss(self, output: Tensor, part: Batch, normalizer: float) -> LossOutput:
        algorithm = self.context.config.algorithm
        assert isinstance(algorithm, CriticConfig)
        values = output.gather(1, response_positions(part))
        return value_loss(
            values, part.values, part.returns, part.response_mask, clip=algorithm.value_clip, normalizer=normalizer
        )


def _values_and_last(output: Tensor, part: Batch) -> Tensor:
    """[b, 1 + R]: the value after the last token, then the value before every response token (0 where masked)."""
    values = torch.where(part.response_mask, output.gather(1, response_positions(part)), 0.0)
    last = output.gather(1, (part.lengths() - 1).clamp(min=0)[:, None])
    return torch.cat([last, values], dim=1)
