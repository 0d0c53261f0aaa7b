"""Reward: scores finished responses; an answer that cannot be scored is NaN, never 0."""

from collections.abc import Sequence

import torch

from engine.batch import Batch
from engine.controller.dispatch import DP, ONE_TO_ALL, dispatch
from engine.controller.worker import Worker, WorkerContext
from engine.reward.combine import Reward
from engine.reward.scorer import Sample


class RewardWorker(Worker):
    """One rank of the scorers of the run."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._reward = Reward(context.config.reward, max_unscored_share=context.config.max_unscored_share)

    @dispatch(DP, reads=("group_ids", "prompt", "response", "answer", "extra"))
    def score(self, batch: Batch) -> Batch:
        """scores [B] (NaN = unscored) and the column `components`: {component: score or None} per response."""
        samples = _samples(batch, batch.column("response"))
        scored = self._reward.score(samples)
        components = [
            {name: None if values[row] != values[row] else values[row] for name, values in scored.components.items()}
            for row in range(len(samples))
        ]
        return Batch({"scores": torch.tensor(scored.scores, dtype=torch.float32)}, {"components": components})

    @dispatch(ONE_TO_ALL, reads=("prompt", "answer", "extra"))
    def canary(self, batch: Batch) -> None:
        """Score known-right and known-wrong answers of these rows; ConfigError if a scorer cannot tell them apart."""
        self._reward.canary(_samples(batch, [""] * len(batch)))

    def close(self) -> None:
        """End the scorer processes."""
        self._reward.close()


def _samples(batch: Batch, responses: Sequence[str]) -> list[Sample]:
    rows = zip(batch.column("prompt"), responses, batch.column("answer"), batch.column("extra"), strict=True)
    return [
        Sample(prompt, response, answer, extra, index) for index, (prompt, response, answer, extra) in enumerate(rows)
    ]
