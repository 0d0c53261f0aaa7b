"""A run's record in MLflow: parameters, data sets, metrics of every committed step; written from the manifests, so that
it can be repeated, continued after a kill and completed after an outage without a point missing or doubled."""

import json
import logging
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from engine.errors import TransientError
from engine.runs import Run, read_record
from engine.store import StepRef, step_path
from tasks.mlflow_store import artifact_root, connect, patiently
from tasks.refs import RunRef, opened

if TYPE_CHECKING:
    from mlflow.entities import Metric

log = logging.getLogger(__name__)
KEY_TAG = "run_key"
_BATCH = 1000  # metrics that MLflow takes in one request
_PARAMS = 100  # parameters that MLflow takes in one request
_CANCEL_S = 5.0  # that a cancelled run waits for an MLflow which may never answer
_CONTEXT = {"data/train": "training", "data/eval": "evaluation"}

T = TypeVar("T")


class Tracker:
    """The MLflow run of one of our runs, made or continued; `log_committed` adds what was committed since it last ran."""

    def __init__(self, run: Run) -> None:
        assert run.config.registry is not None
        self.run = run
        self.client = connect(run.config.root, run.config.registry.tracking_uri)
        self.run_id = self._run_id()
        self._logged: set[str] = set()  # paths of steps
        self._describe()

    def log_committed(self) -> None:
        """Send the metrics of every committed step that this object has not sent yet."""
        steps = list(self._unsent())
        points = [point for step, ref in steps for point in self._points(step, ref)]
        for batch in _batches(points, _BATCH):
            patiently(lambda part=batch: self.client.log_batch(self.run_id, metrics=part))  # type: ignore[misc]
        self._logged.update(ref.path for _, ref in steps)

    def finish(self, status: str, tags: dict[str, str]) -> None:
        """End the MLflow run: FINISHED, FAILED or KILLED."""
        for name, value in tags.items():
            patiently(lambda name=name, value=value: self.client.set_tag(self.run_id, name, value))  # type: ignore[misc]
        patiently(lambda: self.client.set_terminated(self.run_id, status))

    def _run_id(self) -> str:
        experiment = patiently(self._experiment)
        found = patiently(
            lambda: self.client.search_runs([experiment], f"tags.{KEY_TAG} = '{self.run.key}'", max_results=1)
        )
        if found:
            run_id = found[0].info.run_id
            patiently(lambda: self.client.update_run(run_id, status="RUNNING"))
        else:
            tags = {KEY_TAG: self.run.key}
            run_id = patiently(lambda: self.client.create_run(experiment, tags=tags, run_name=self.run.key)).info.run_id
        return str(run_id)

    def _experiment(self) -> str:
        config = self.run.config
        assert config.registry is not None
        existing = self.client.get_experiment_by_name(config.name)
        if existing is not None:
            return str(existing.experiment_id)
        files = artifact_root(config.root, config.registry.tracking_uri)
        return str(
            self.client.create_experiment(config.name, artifact_location=f"{files}/{config.name}" if files else None)
        )

    def _describe(self) -> None:
        """Tags, parameters, configuration file and data sets; an existing parameter keeps the value it first had."""
        from mlflow.entities import Param, RunTag

        config = self.run.config.model_dump(mode="json")
        record = read_record(self.run.store.folder)
        tags = {
            "config_digest": self.run.store.config_digest,
            "seed": str(self.run.config.seed),
            "code_revision": str(record["code_revision"]),
            "run_dir": str(self.run.store.folder),
        }
        known = patiently(lambda: self.client.get_run(self.run_id)).data.params
        params = [Param(name, value) for name, value in flatten(config).items() if name not in known]
        for batch in _batches(params, _PARAMS):
            patiently(lambda part=batch: self.client.log_batch(self.run_id, params=part))  # type: ignore[misc]
        patiently(lambda: self.client.log_batch(self.run_id, tags=[RunTag(*item) for item in tags.items()]))
        patiently(lambda: self.client.log_dict(self.run_id, config, "config.json"))
        patiently(lambda: self.client.log_inputs(self.run_id, self._datasets(record["fingerprints"])))

    def _datasets(self, fingerprints: dict[str, str]) -> list[Any]:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        data = self.run.config.data
        paths = {
            "data/train": [source.path for source in data.train],
            "data/eval": [source.path for source in data.eval],
        }
        return [
            DatasetInput(
                Dataset(
                    name=name.removeprefix("data/"),
                    digest=digest[:32],
                    source_type="local",
                    source=json.dumps({"uri": ", ".join(paths.get(name, [])) or str(self.run.store.folder / "data")}),
                ),
                [InputTag("mlflow.data.context", _CONTEXT.get(name, name))],
            )
            for name, digest in sorted(fingerprints.items())
            if name.startswith("data/")
        ]

    def _unsent(self) -> Iterator[tuple[int, StepRef]]:
        """(iteration, step) of every committed step that may hold metrics and was not sent yet."""
        paths = [(0, "start")]
        for iteration in range(self.run.config.iterations + 1):
            paths += [(iteration, step_path(kind, iteration)) for kind in ("rollout", "train", "evaluation")]
        for iteration, path in paths:
            if path not in self._logged and (ref := self.run.store.committed(path)):
                yield iteration, ref

    def _points(self, step: int, ref: StepRef) -> Iterator["Metric"]:
        from mlflow.entities import Metric

        manifest = self.run.store.manifest(ref)
        values = dict(manifest.metrics)
        for suite, report in manifest.facts.get("suites", {}).items():
            values |= {f"eval/{suite}/{name}": value for name, value in report.items()}
        for name, value in values.items():
            if isinstance(value, int | float):
                yield Metric(name, float(value), int(manifest.committed_at * 1000), step)


_TRACKERS: dict[RunRef, Tracker] = {}
_CONTACTS: dict[RunRef, threading.Thread] = {}  # that make a tracker; they take seconds in which the run goes on


def tracker_for(ref: RunRef) -> Tracker:
    """The run's tracker in this process. Raises TransientError if MLflow cannot be used."""
    if contact := _CONTACTS.pop(ref, None):
        contact.join()
    if ref not in _TRACKERS:
        _TRACKERS[ref] = Tracker(opened(ref))
    return _TRACKERS[ref]


def track(ref: RunRef) -> None:
    """Show MLflow what is committed so far; the first call only begins to reach it.

    An outage delays the points (the manifests keep them), it does not stop the run.
    """
    if opened(ref).config.registry is None:
        return
    if ref not in _TRACKERS:
        _begin_contact(ref)
        return
    try:
        _TRACKERS[ref].log_committed()
    except TransientError as error:
        _delayed(error)


def end_tracking(ref: RunRef, status: str, tags: dict[str, str]) -> None:
    """Send what is missing and end the MLflow run; does nothing for a run that never talked to MLflow.

    A cancelled run does not wait long, because MLflow's own retries take minutes. Raises TransientError if MLflow cannot be
    used.
    """
    cancelled = status == "KILLED"
    if contact := _CONTACTS.pop(ref, None):
        contact.join(_CANCEL_S if cancelled else None)
    tracker = _TRACKERS.pop(ref, None)
    if tracker is None:
        return
    if not cancelled:
        _end(tracker, status, tags)
        return
    ending = threading.Thread(target=_end_or_tell, args=(tracker, status, tags), name="mlflow", daemon=True)
    ending.start()
    ending.join(_CANCEL_S)
    if ending.is_alive():
        raise TransientError(f"MLflow did not answer within {_CANCEL_S:g} s.")


def _end(tracker: Tracker, status: str, tags: dict[str, str]) -> None:
    tracker.log_committed()
    tracker.finish(status, tags)


def _end_or_tell(tracker: Tracker, status: str, tags: dict[str, str]) -> None:
    try:
        _end(tracker, status, tags)
    except TransientError as error:
        _delayed(error)


def _begin_contact(ref: RunRef) -> None:
    """Make the tracker beside the run, unless that is being done."""
    if ref in _CONTACTS and _CONTACTS[ref].is_alive():
        return
    _CONTACTS[ref] = threading.Thread(target=_reach, args=(ref,), name="mlflow", daemon=True)
    _CONTACTS[ref].start()


def _reach(ref: RunRef) -> None:
    try:
        _TRACKERS[ref] = Tracker(opened(ref))
    except TransientError as error:
        _delayed(error)


def _delayed(error: TransientError) -> None:
    log.warning("MLflow gets this run's metrics later: %s", error)


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested options as `section.option` -> text."""
    if isinstance(value, dict):
        return {
            key: text
            for name, item in value.items()
            for key, text in flatten(item, f"{prefix}.{name}".strip(".")).items()
        }
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return flatten({str(index): item for index, item in enumerate(value)}, prefix)
    return {prefix: str(value)}


def _batches(items: list[T], size: int) -> Iterator[list[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
