"""What a run does when a device runs out of memory in a step: smaller micro-batches, once."""

import logging

from engine.config import RunConfig
from engine.errors import ConfigError, DeviceMemoryError, Problem

log = logging.getLogger(__name__)


def smaller_micro_batches(config: RunConfig, error: DeviceMemoryError, *, halved: bool) -> RunConfig:
    """The configuration with half the tokens in a micro-batch; numbers stay the same but for the order of sums.

    halved: whether that was done before: ConfigError then, because less is for the user to decide.
    """
    budget = config.train.micro_batch_tokens
    if halved:
        remedy = f"{error.message} Half of the configured value did not do either: lower it further, or use more ranks"
        problem = Problem("train.micro_batch_tokens", budget, remedy)
        raise ConfigError("The devices are too small.", problems=[problem]) from error
    log.warning("%s Micro-batches have %d tokens instead of %d from now on.", error, budget // 2, budget)
    train = config.train.model_copy(update={"micro_batch_tokens": max(budget // 2, 1)})
    return config.model_copy(update={"train": train})
