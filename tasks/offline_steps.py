"""What a run on fixed rows computes, as durable steps: start checkpoint, stretches of optimiser steps, measurements."""

from engine.offline_checks import commit_points, evaluated_at
from engine.offlineconfig import OfflineConfig
from engine.store import StepRef
from tasks.attempts import steps_done
from tasks.refs import RunRef, durable, opened
from tasks.sessions import offline_session_for


@durable("start")
def start_model(run: RunRef, data: StepRef) -> StepRef:
    """Commit the start checkpoint: the base model, or random weights in its place."""
    return offline_session_for(run).start(data)


@durable("train")
def train_steps(run: RunRef, iteration: int, before: StepRef) -> StepRef:
    """Take all optimiser steps from the committed step `before` up to number `iteration` and commit the weights."""
    return offline_session_for(run).train(iteration, before)


@durable("evaluation")
def evaluate_model(run: RunRef, iteration: int, model: StepRef) -> StepRef:
    """Measure a committed model on the held-out rows; iteration 0 = start checkpoint."""
    return offline_session_for(run).evaluate(iteration, model)


def stretches(run: RunRef) -> list[int]:
    """The optimiser steps after which the run has committed weights, and those after which it still will."""
    opened_run = opened(run)
    done = steps_done(opened_run.store)
    last = done[-1] if done else 0
    return done + [step for step in commit_points(opened_run.config) if step > last]


def measured_after(config: OfflineConfig, step: int) -> bool:
    """Whether the model is measured after this optimiser step: every k-th one and the last."""
    return evaluated_at(config, step)
