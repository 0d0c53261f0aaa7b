"""OfflineSession: the workers of one run on fixed rows and the step they hold; commits weights every few optimiser steps."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.controller.group import WorkerGroup
from engine.data.completions import Example, Preference
from engine.data.examplefile import load_examples
from engine.data.pairfile import load_pairs
from engine.dataflows.offline_roles import OfflineRoles
from engine.errors import StoreError
from engine.metrics import Metrics, merge
from engine.offline_placement import place_offline
from engine.offlineconfig import SUITE, OfflineConfig, SFTObjective
from engine.placed import Workers
from engine.retention import apply_retention
from engine.runs import MODEL, Run, policy_folder, require_source
from engine.seeds import stream_rows
from engine.store import StepRef, step_path
from engine.workers.preference import PreferenceWorker
from engine.workers.trained import TrainedWorker, optimizer_file

START = "start"
Listener = Callable[[str, int, int, Metrics], None]  # stage, step, steps planned, metrics


class OfflineSession:
    """Runs stretches of optimiser steps on the workers and commits their results.

    A step of the run directory is named by the number of optimiser steps behind it. Every method looks for the committed
    step, brings the workers to the state of its parent, computes and commits; so an interrupted run ends as any other.
    """

    def __init__(self, run: Run[OfflineConfig], listener: Listener | None = None) -> None:
        require_source(run)
        self.run = run
        self._listener = listener
        self._workers = Workers(lambda was_up: place_offline(run, met_before=was_up))
        self._held: StepRef | None = None  # whose weights and optimiser the model has
        self._flow = importlib.import_module(f"engine.dataflows.{run.config.objective.name}")
        self._rows: dict[str, Sequence[Example | Preference]] = {}

    def warm_up(self) -> None:
        """Begin starting the workers in the background; errors surface at the first step."""
        self._workers.warm_up()

    def start(self, data: StepRef) -> StepRef:
        """Commit the start checkpoint (`start/`): the base model, or random weights in its place."""
        run, train = self.run, self.run.config.train
        if done := run.store.committed(START, parent=data):
            return done
        with self._guard(), run.store.commit(START, parent=data) as draft:
            if run.config.model.init == "pretrained":
                draft.facts = {"folder": str(run.source)}
            else:
                model = self._roles().model
                model.call(TrainedWorker.load, str(run.source), "random", train, run.config.steps)
                saved = model.call(TrainedWorker.save, str(draft.folder / MODEL), str(run.source), False)
                draft.facts = {"folder": None, **saved}
        return draft.ref

    def train(self, step: int, before: StepRef) -> StepRef:
        """Take all optimiser steps from the committed step `before` up to `step` and commit the weights."""
        run = self.run
        path = step_path("train", step)
        if done := run.store.committed(path, parent=before):
            return done
        with self._guard():
            self._hold(before)
            self._held = None  # the workers are ahead of the store until the commit succeeds
            metrics = merge(self._learn(number) for number in range(steps_of(before), step))
            with run.store.commit(path, parent=before) as draft:
                saved = self._roles().model.call(TrainedWorker.save, str(draft.folder / MODEL), str(run.source), True)
                if saved["steps"] != step:
                    raise StoreError(
                        f"The optimiser has taken {saved['steps']} steps where {step} were planned.",
                        path=str(draft.folder),
                        remedy="Nothing was committed. Resume the run.",
                    )
                draft.facts = {"weights": True, **saved}
                draft.metrics = (metrics | self._seconds()).values()
            self._held = draft.ref
        apply_retention(run.store, step, run.config.checkpoint, SUITE)
        return draft.ref

    def evaluate(self, step: int, model: StepRef) -> StepRef:
        """Measure a committed model on the held-out rows; step 0 = start checkpoint. facts: {"suites": {"held_out": ...}}."""
        path = step_path("evaluation", step)
        if done := self.run.store.committed(path, parent=model):
            return done
        with self._guard():
            self._hold(model)
            rows = self._data("eval")[: self.run.config.evaluation.max_rows]
            with self.run.store.commit(path, parent=model) as draft:
                draft.facts = {"suites": {SUITE: self._flow.measure(self._roles(), rows, self.run.config)}}
                draft.metrics = self._seconds().values()
        return draft.ref

    def close(self) -> None:
        """End all worker processes of the run; harmless when repeated."""
        self._held = None
        self._workers.close()

    def _roles(self) -> OfflineRoles:
        return self._workers.roles()

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """After any failure the workers' state is unknown: they are ended, and built again by the next attempt."""
        try:
            yield
        except Exception:
            self.close()
            raise

    def _learn(self, number: int) -> Metrics:
        """Optimiser step `number` (from 0)."""
        config, rows = self.run.config, self._data("train")
        chosen = stream_rows(len(rows), config.train.batch_size, number, config.seed, "rows")
        metrics: Metrics = self._flow.learn(self._roles(), [rows[row] for row in chosen], config)
        if self._listener is not None:
            self._listener(config.objective.name, number + 1, config.steps, metrics)
        return metrics

    def _hold(self, step: StepRef) -> None:
        """Bring the model to exactly the state committed in `step`, and the reference to the start checkpoint."""
        if self._held == step:
            return
        self._held = None
        roles, config, folder = self._roles(), self.run.config, policy_folder(self.run, step)
        roles.model.call(TrainedWorker.load, str(folder), "pretrained", config.train, config.steps)
        if step.path != START:
            roles.model.call(TrainedWorker.load_optimizer, str(optimizer_file(folder)))
        if roles.reference is not None:
            start = self.run.store.committed(START)
            assert start is not None
            folder = policy_folder(self.run, start)
            roles.reference.call(PreferenceWorker.load, str(folder), "pretrained", None, 1)
        self._held = step

    def _data(self, split: str) -> Sequence[Any]:
        """The rows of `train` or `eval`, read once."""
        if split not in self._rows:
            store = self.run.store
            data = store.committed("data")
            if data is None:
                raise StoreError("The run has no prepared data.", path=str(store.folder), remedy="Resume the run.")
            supervised = isinstance(self.run.config.objective, SFTObjective)
            load: Callable[[Path], Sequence[Any]] = load_examples if supervised else load_pairs
            self._rows[split] = load(store.read(data) / f"{split}.parquet")
        return self._rows[split]

    def _seconds(self) -> Metrics:
        """Wall seconds spent in each role's methods since last asked."""
        metrics = Metrics()
        roles = self._roles()
        groups: list[WorkerGroup] = [group for group in (roles.model, roles.reference) if group is not None]
        for group in groups:
            for name, seconds in group.take_seconds().items():
                metrics = metrics.with_value(f"time/{name.replace('.', '_')}_s", seconds, "sum")
        return metrics


def steps_of(step: StepRef) -> int:
    """Optimiser steps behind a start or train step."""
    return 0 if step.path == START else int(step.path.split("/")[1])
