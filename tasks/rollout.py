"""Rollout half of an iteration as a durable step."""

from engine.store import StepRef
from tasks.refs import RunRef, durable
from tasks.sessions import session_for


@durable("rollout")
def rollout_iteration(run: RunRef, iteration: int, policy: StepRef) -> StepRef:
    """Generate, score and commit the experience of an iteration with the policy committed in `policy`."""
    return session_for(run).rollout(iteration, policy)
