"""A run whose iterations are done, made in milliseconds: what the gate and the registry work on."""

from typing import Any

from engine.config import RunConfig
from engine.store import StepRef
from tasks import registry
from tasks.data import start_run
from tasks.gate import gate_policy
from tasks.refs import opened
from tests.unit.tasks.fake_session import FakeSession


class Finished:
    """A run whose iterations are done, and the steps that registration takes."""

    def __init__(self, config: RunConfig, run_key: str, *, obstacle: str | None = None) -> None:
        self.ref = start_run(config, run_key)
        run = opened(self.ref)
        session = FakeSession(run)
        data = run.store.committed("data")
        assert data is not None
        policy = session.start(data)
        self.baseline = session.evaluate(0, policy)
        for iteration in range(1, config.iterations + 1):
            policy = session.train(iteration, session.rollout(iteration, policy))
        self.policy = policy
        self.evaluation = session.evaluate(config.iterations, policy)
        self.gate = gate_policy.fn(self.ref, self.evaluation, self.baseline, obstacle)

    def register(self) -> dict[str, Any]:
        step: StepRef = registry.register_policy.fn(self.ref, self.gate, self.policy, self.evaluation)
        return opened(self.ref).store.manifest(step).facts
