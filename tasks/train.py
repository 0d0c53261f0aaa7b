"""What makes new weights, as durable steps: the start checkpoint and the training half of an iteration."""

from engine.store import StepRef
from tasks.refs import RunRef, durable
from tasks.sessions import session_for


@durable("start")
def start_checkpoint(run: RunRef, data: StepRef) -> StepRef:
    """Commit the start checkpoint: the base model, or what supervised fine-tuning made of it."""
    return session_for(run).start(data)


@durable("train")
def train_iteration(run: RunRef, iteration: int, experience: StepRef) -> StepRef:
    """Learn from one committed experience and commit the new weights."""
    return session_for(run).train(iteration, experience)
