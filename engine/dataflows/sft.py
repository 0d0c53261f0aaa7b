"""Supervised fine-tuning: makes the start checkpoint from prompt and completion rows."""

from collections.abc import Callable, Sequence
from typing import Any

from engine.batch import Batch
from engine.config import SFTConfig
from engine.controller.group import WorkerGroup
from engine.data.completions import Example
from engine.dataflows.offline_roles import OfflineRoles
from engine.dataflows.ranking import likelihood_report
from engine.dataflows.sequences import sequence_batch
from engine.metrics import Metrics
from engine.offlineconfig import OfflineConfig
from engine.seeds import stream_rows
from engine.workers.policy import PolicyWorker
from engine.workers.preference import PreferenceWorker


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


def learn(roles: OfflineRoles, examples: Sequence[Example], config: OfflineConfig) -> Metrics:
    """One optimiser step of a run on fixed rows."""
    batch = as_batch(examples)
    metrics: Metrics = roles.model.call(PreferenceWorker.update_sft, batch, float(batch.response_mask.sum()))
    return metrics


def measure(roles: OfflineRoles, examples: Sequence[Example], config: OfflineConfig) -> dict[str, Any]:
    """Report on held-out rows: negative log-likelihood per completion token; score_mean is its negative."""
    batch = as_batch(examples)
    logprobs = roles.model.call(PreferenceWorker.score_completions, batch).logprobs
    return likelihood_report(logprobs, batch.response_mask)


def as_batch(examples: Sequence[Example]) -> Batch:
    """Prompt and completion as prompt and response, masks from the recorded lengths."""
    return sequence_batch([example.input_ids for example in examples], [example.prompt_length for example in examples])
