"""An experience is learned from only where sampler and trainer are known to agree."""

import math
from pathlib import Path

import pytest
import torch

from engine.batch import Batch
from engine.dataflows.experience import correct
from engine.errors import DivergedError
from tests.helpers.learning import toy_config


def samples(*trainer: float, mask: bool = True) -> Batch:
    """One response, of which the trainer says these log-probabilities and the sampler -1 for every token."""
    return Batch(
        {
            "old_logprobs": torch.tensor([trainer]),
            "rollout_logprobs": torch.full((1, len(trainer)), -1.0),
            "response_mask": torch.full((1, len(trainer)), mask),
            "scores": torch.ones(1),
        }
    )


@pytest.mark.parametrize("mode", ["none", "token", "icepop", "sequence", "geometric"])
@pytest.mark.parametrize("value", [math.nan, -math.inf, -9.0])
def test_a_trainer_that_disagrees_or_gives_no_number_stops_the_step(tmp_path: Path, mode: str, value: float) -> None:
    config = toy_config(tmp_path / "model", {"name": "grpo", "correction": {"mode": mode}})
    with pytest.raises(DivergedError, match="nats per token"):
        correct(samples(-1.0, value), config)


def test_nothing_to_compare_is_no_disagreement(tmp_path: Path) -> None:
    config = toy_config(tmp_path / "model", {"name": "grpo"})
    batch, _ = correct(samples(math.nan, mask=False), config)
    assert batch.rollout_weights.tolist() == [[0.0]]
