"""Scores from a service of the user's own, asked in batches over HTTP."""

from collections.abc import Iterable, Iterator
from itertools import islice

from engine.errors import ShapeError
from engine.reward.endpoint import Endpoint
from engine.reward.scorer import Sample, Score, Unscored, as_score
from engine.reward.threads import side_by_side


class RemoteScorer:
    """POST {"samples": [{"prompt", "response", "answer", "extra"}]}, reply {"scores": [number or null]}; null = unscored.

    A call that fails leaves its own batch unscored and no other. A call waits until its batch is full or no sample is left.
    """

    def __init__(self, endpoint: Endpoint, *, batch_size: int, concurrency: int) -> None:
        self._endpoint = endpoint
        self._batch_size = batch_size
        self._concurrency = concurrency

    def score(self, samples: Iterable[Sample]) -> list[Score]:
        """One entry per sample, in order. Raises ShapeError if a reply has not one score for each sample."""
        parts = side_by_side(self._score_batch, self._batches(samples), at_once=self._concurrency)
        return [score for part in parts for score in part]

    def close(self) -> None:
        """End what is under way."""
        self._endpoint.close()

    def _batches(self, samples: Iterable[Sample]) -> Iterator[list[Sample]]:
        rest = iter(samples)
        while batch := list(islice(rest, self._batch_size)):
            yield batch

    def _score_batch(self, samples: list[Sample]) -> list[Score]:
        rows = [
            {"prompt": one.prompt, "response": one.response, "answer": one.answer, "extra": one.extra}
            for one in samples
        ]
        reply = self._endpoint.post({"samples": rows})
        if isinstance(reply, Unscored):
            return [reply] * len(samples)
        scores = reply.get("scores") if isinstance(reply, dict) else None
        if not isinstance(scores, list):
            reason = f'{self._endpoint.url} answered JSON of another form than {{"scores": [number or null, ...]}}'
            return [Unscored("refused", reason)] * len(samples)
        if len(scores) != len(samples):
            raise ShapeError(
                f"{self._endpoint.url} was sent {len(samples)} samples and returned {len(scores)} scores.",
                remedy="The service returns exactly one score or null per sample, in order.",
            )
        return [as_score(score) for score in scores]
