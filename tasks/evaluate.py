"""Evaluation of a committed policy as a durable step."""

from engine.config import RunConfig
from engine.store import StepRef
from tasks.refs import RunRef, durable
from tasks.sessions import session_for


@durable("evaluation")
def evaluate_policy(run: RunRef, iteration: int, policy: StepRef) -> StepRef:
    """Greedy answers of a committed policy on every suite, as a committed report; iteration 0 = start checkpoint."""
    return session_for(run).evaluate(iteration, policy)


def evaluation_due(config: RunConfig, iteration: int) -> bool:
    """Whether the policy of this iteration is evaluated: every k-th one and the last."""
    every = config.evaluation.every
    return iteration == config.iterations or (every is not None and iteration % every == 0)
