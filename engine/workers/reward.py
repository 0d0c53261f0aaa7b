"""Reward: scores finished responses; an answer that cannot be scored is NaN, never 0."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.batch import Batch
from engine.config import ModelReward
from engine.controller.dispatch import DP, ONE_TO_ALL, dispatch
from engine.controller.stream import Arriving
from engine.controller.worker import Worker, WorkerContext
from engine.reward.combine import Reward
from engine.reward.scorer import Sample
from engine.workers.scoring_model import ModelScorer, ScoringModel

_SAMPLE = ("prompt", "answer", "extra", "input_ids", "prompt_lengths")
SCORED = (*_SAMPLE, "response", "response_lengths")


@dataclass(frozen=True)
class ArrivingSamples:
    """Samples of a share in the order in which they come, each with its row as index; gone through as often as one likes."""

    share: Arriving
    read: Callable[[Batch], list[Sample]]

    def __iter__(self) -> Iterator[Sample]:
        for rows, part in self.share.parts():
            for row, sample in zip(rows, self.read(part), strict=True):
                yield replace(sample, index=row)


class RewardWorker(Worker):
    """One rank of the scorers of the run."""

    section = "reward"  # of the configuration

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        rewards = {"reward": context.config.reward, "cost": context.config.cost}[self.section]
        models = {
            position: ModelScorer(ScoringModel(context, f"{self.section}[{position}]"))
            for position, reward in enumerate(rewards)
            if isinstance(reward, ModelReward)
        }
        self._reward = Reward(rewards, self.section, models=models)
        self._sees_tokens = bool(models)

    @dispatch(DP, reads=SCORED, streams=True)
    def score(self, batch: Batch | Arriving) -> Batch:
        """scores [B] (NaN = unscored) and two columns: `components`, {component: score or None} per response, and
        `unscored`, {component: reason} per response, empty where all components gave a score.

        From another process responses come one by one, and each is scored while others are still being generated; in one
        process all are there before the first is scored. The result is the same.
        """
        samples = self._answered(batch) if isinstance(batch, Batch) else ArrivingSamples(batch, self._answered)
        scored = self._reward.score(samples)
        rows = [sample.index for sample in samples]
        scores = torch.full((len(rows),), torch.nan)
        scores[rows] = torch.tensor(scored.scores, dtype=torch.float32)
        components: list[dict[str, Any]] = [{} for _ in rows]
        for name, values in scored.components.items():
            for row, value in zip(rows, values, strict=True):
                components[row][name] = None if value != value else value
        unscored: list[dict[str, str]] = [{} for _ in rows]
        for failure in scored.failures:
            unscored[failure.index][failure.component] = failure.reason
        return Batch({"scores": scores}, {"components": components, "unscored": unscored})

    @dispatch(ONE_TO_ALL, reads=_SAMPLE)
    def canary(self, batch: Batch) -> None:
        """Score known-right and known-wrong answers of these rows; ConfigError if a scorer cannot tell them apart."""
        self._reward.canary(self._samples(batch, [""] * len(batch), [0] * len(batch)))

    def close(self) -> None:
        """End the scorer processes."""
        self._reward.close()

    def _answered(self, batch: Batch) -> list[Sample]:
        return self._samples(batch, batch.column("response"), batch.response_lengths.tolist())

    def _samples(self, batch: Batch, responses: Sequence[str], tokens: Sequence[int]) -> list[Sample]:
        rows = zip(batch.column("prompt"), responses, batch.column("answer"), batch.column("extra"), strict=True)
        lengths, ids = batch.lengths().tolist(), batch.input_ids
        return [
            Sample(
                *row, index, tokens[index], tuple(ids[index, : lengths[index]].tolist()) if self._sees_tokens else ()
            )
            for index, row in enumerate(rows)
        ]
