"""Loss denominators of every optimiser step, taken over the whole mini-batch so that micro-batches and ranks add up."""

from engine.algorithms.losses import loss_denominator
from engine.batch import Batch
from engine.config import RunConfig


def denominators(batch: Batch, config: RunConfig, aggregation: str) -> list[float]:
    """One number per mini-batch, in the unit of the aggregation mode (tokens, sequences, or sequences x longest)."""
    return [
        float(
            loss_denominator(
                batch.response_mask[batch.mini_batch == number],
                aggregation,
                max_tokens=config.rollout.max_response_tokens,
            )
        )
        for number in range(config.train.mini_batches)
    ]
