"""Retention: whose weights are kept. Manifests and experience always stay; deletion comes after the newer commit."""

import math

from engine.config import CheckpointConfig
from engine.store import Store, step_path


def steps_to_keep(saved: list[int], scores: dict[int, float], checkpoint: CheckpointConfig) -> set[int]:
    """Iterations whose weights stay: the newest keep_last and, besides them, the keep_best by evaluation score.

    saved: iterations with weights; scores: iteration -> evaluation score (NaN never counts as good).
    """
    newest = sorted(saved)[-checkpoint.keep_last :]
    rated = sorted(
        (iteration for iteration in saved if not math.isnan(scores.get(iteration, math.nan))),
        key=lambda i: (scores[i], i),
    )
    best = rated[-checkpoint.keep_best :] if checkpoint.keep_best else []
    return {*newest, *best}


def apply_retention(store: Store, newest: int, checkpoint: CheckpointConfig, suite: str) -> list[int]:
    """Prune the weights of train steps up to `newest` that need not be kept; returns their iterations."""
    steps = {
        iteration: ref
        for iteration in range(1, newest + 1)
        if (ref := store.committed(step_path("train", iteration)))
        and not store.is_pruned(ref)
        and store.manifest(ref).facts["weights"]
    }
    keep = steps_to_keep(list(steps), evaluation_scores(store, newest, suite), checkpoint)
    gone = [iteration for iteration in steps if iteration not in keep]
    for iteration in gone:
        store.prune(steps[iteration])
    return gone


def evaluation_scores(store: Store, newest: int, suite: str) -> dict[int, float]:
    """score_mean of the suite at every evaluated iteration; NaN where nothing could be scored."""
    scores = {}
    for iteration in range(newest + 1):
        if ref := store.committed(step_path("evaluation", iteration)):
            score = store.manifest(ref).facts["suites"][suite]["score_mean"]
            scores[iteration] = math.nan if score is None else score
    return scores
