"""Scores from a language model that is asked to judge, over an OpenAI-compatible endpoint."""

import re
from collections.abc import Iterable
from dataclasses import replace

from engine.config import JudgeReward
from engine.reward.endpoint import Endpoint
from engine.reward.scorer import Sample, Score, Scorer, Unscored
from engine.reward.threads import side_by_side

_PLACE = re.compile(r"\{(prompt|response|answer)\}")
_END = 120  # characters of a reply in a message: the score was to stand at its end


class JudgeScorer:
    """Asks about one sample in each call; its number between low and high becomes a score between 0 and 1.

    reader: scores a Sample whose response is the judge's reply with the number that stands in it.
    """

    def __init__(self, config: JudgeReward, endpoint: Endpoint, reader: Scorer) -> None:
        self._config = config
        self._endpoint = endpoint
        self._reader = reader

    def score(self, samples: Iterable[Sample]) -> list[Score]:
        """One entry per sample, in order; a reply without a number from low to high leaves its sample unscored."""
        replies = side_by_side(self._ask, samples, at_once=self._config.concurrency)
        answered = [reply for reply in replies if isinstance(reply, str)]
        numbers = iter(self._reader.score([Sample("", reply) for reply in answered]))
        return [self._scaled(reply, next(numbers)) if isinstance(reply, str) else reply for reply in replies]

    def close(self) -> None:
        """End what is under way."""
        self._endpoint.close()
        self._reader.close()

    def _ask(self, sample: Sample) -> str | Unscored:
        body = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": filled(self._config.template, sample)}],
            "temperature": 0,
            "max_tokens": self._config.max_tokens,
        }
        reply = self._endpoint.post(body, one_sample=True)
        if isinstance(reply, Unscored):
            return reply
        match reply:
            case {"choices": [{"message": {"content": str(text)}}, *_]}:
                return text
            case {"choices": [{"message": {"content": None}}, *_]}:
                return Unscored("none", f"{self._config.model} answered without a text")
            case _:
                reason = f"{self._endpoint.url} answered JSON of another form than a chat completion"
                return Unscored("refused", reason)

    def _scaled(self, reply: str, number: Score) -> Score:
        low, high = self._config.low, self._config.high
        if isinstance(number, Unscored):
            if number.cause != "none":
                return number
            return replace(
                number, reason=f"the reply of {self._config.model} holds no score; it ends {reply[-_END:]!r}"
            )
        if not low <= number <= high:
            return Unscored("none", f"{self._config.model} gave {number:g}, which is not between {low:g} and {high:g}")
        return (number - low) / (high - low)


def filled(template: str, sample: Sample) -> str:
    """The template with the sample's texts; what stands in a text is not taken for a place, other braces stay."""
    texts = {"prompt": sample.prompt, "response": sample.response, "answer": sample.answer or ""}
    return _PLACE.sub(lambda place: texts[place[1]], template)
