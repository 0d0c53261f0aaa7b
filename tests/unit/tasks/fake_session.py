"""A session without workers: commits small folders through the real store, as the real one does, and notes what it did."""

import hashlib
import shutil
from typing import Any, ClassVar

from engine.runs import Run
from engine.store import StepRef, step_path


class FakeSession:
    """Stands in for engine.session.Session; what happens is scripted by class variables, cleared by `reset`."""

    failures: ClassVar[dict[str, list[BaseException]]] = {}  # step -> errors, each raised once before it is committed
    scores: ClassVar[dict[int, float | None]] = {}  # iteration -> evaluation score, else 0.5 + iteration / 10
    learned: ClassVar[dict[str, float]] = {}  # metrics of every training step besides its gradient norm
    calls: ClassVar[list[str]] = []  # steps that were computed, and "close"

    @classmethod
    def reset(cls) -> None:
        """Forget the script and the calls."""
        cls.failures.clear()
        cls.scores.clear()
        cls.learned.clear()
        cls.calls.clear()

    def __init__(self, run: Run, listener: object = None) -> None:
        self.run = run

    def warm_up(self) -> None:
        """Nothing to start."""

    def start(self, data: StepRef) -> StepRef:
        """The base model itself."""
        return self._step("start", data, {"folder": str(self.run.source)}, {})

    def rollout(self, iteration: int, parent: StepRef) -> StepRef:
        """An experience of which only metrics are left, one of them not measured."""
        metrics = {"reward/score_mean": iteration / 10, "reward/score_std": float("nan")}
        return self._step(step_path("rollout", iteration), parent, {"samples": 4}, metrics)

    def train(self, iteration: int, experience: StepRef) -> StepRef:
        """Weights equal to the base model's."""
        facts = {"weights": True, "sha256": hashlib.sha256(b"weights of %d" % iteration).hexdigest()}
        return self._step(
            step_path("train", iteration), experience, facts, {"train/grad_norm": 1.0 / iteration, **self.learned}
        )

    def evaluate(self, iteration: int, policy: StepRef) -> StepRef:
        """The scripted score on the suite `held_out`."""
        score = self.scores.get(iteration, 0.5 + iteration / 10)
        suites = {"held_out": {"score_mean": score, "rows": 8, "unscored": 0}}
        return self._step(step_path("evaluation", iteration), policy, {"suites": suites}, {})

    def close(self) -> None:
        """Note that the workers would be down now."""
        self.calls.append("close")

    def _step(self, path: str, parent: StepRef, facts: dict[str, Any], metrics: dict[str, float]) -> StepRef:
        if done := self.run.store.committed(path, parent=parent):
            return done
        if errors := self.failures.get(path):
            raise errors.pop(0)
        self.calls.append(path)
        with self.run.store.commit(path, parent=parent) as draft:
            draft.facts, draft.metrics = facts, metrics
            (draft.folder / "parent").write_text(parent.manifest_sha256)
            if path.endswith("train"):
                shutil.copytree(self.run.source, draft.folder / "policy")
        return draft.ref
