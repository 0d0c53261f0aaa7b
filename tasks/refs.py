"""Small references that tasks take and return, and what makes a task durable: retry condition, cache key, opened runs."""

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from prefect import Task, task
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.results import get_result_store

from engine.errors import HybridFlowError
from engine.runs import Run, open_run
from engine.store import StepRef, step_path
from tasks.preemption import unhurried

log = logging.getLogger(__name__)
_PER_ITERATION = ("rollout", "train", "evaluation")
_KEY_DIGITS = 12  # of each hash in a cache key

T = TypeVar("T")


@dataclass(frozen=True)
class RunRef:
    """JSON-able name of a run: the absolute folder or the URL that holds runs, and the run's key."""

    root: str
    run_key: str


_OPENED: dict[RunRef, Run[Any]] = {}


def remember(run: Run[Any]) -> RunRef:
    """Make an opened run the one that this process's tasks work on; its configuration may differ from the recorded
    one in what does not change results (placement, retention)."""
    ref = RunRef(run.root, run.key)
    _OPENED[ref] = run
    return ref


def opened(ref: RunRef) -> Run[Any]:
    """The run of a reference, opened once per process. Raises ConfigError if there is no such run."""
    if ref not in _OPENED:
        _OPENED[ref] = open_run(ref.root, ref.run_key)
    return _OPENED[ref]


def is_transient(task: Task[Any, Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Whether a failed task is worth doing again: only errors that say so of themselves."""
    error = state.data
    again = isinstance(error, HybridFlowError) and error.retryable
    if again and task_run.run_count <= task.retries:
        log.warning(
            "%s failed and is tried again (%s of %s): %s", task_run.name, task_run.run_count, task.retries, error
        )
    return again


def step_of(kind: str, parameters: dict[str, Any]) -> str:
    """Folder of the step that a task of this name and these parameters commits."""
    return step_path(kind, parameters["iteration"]) if kind in _PER_ITERATION else kind


def step_key(context: TaskRunContext, parameters: dict[str, Any]) -> str:
    """Cache key of a durable task: run, configuration, step, parent and the committed manifest, readable, in this order.

    Prefect can only find a result under the key while the
    store holds that very manifest; a step that is not committed gets a key that was never used before.
    """
    run = opened(parameters["run"])
    path = step_of(context.task.name, parameters)
    parent = parent_of(parameters)
    done = run.store.committed(path, parent=parent)
    parts = [
        run.key,
        f"config-{run.store.config_digest[:_KEY_DIGITS]}",
        path.replace("/", "-"),
        f"from-{parent.manifest_sha256[:_KEY_DIGITS]}" if parent else "from-nothing",
        f"is-{done.manifest_sha256[:_KEY_DIGITS]}" if done else f"new-{uuid.uuid4().hex}",
    ]
    return "--".join(parts)


def cache_key(context: TaskRunContext, parameters: dict[str, Any]) -> str:
    """`step_key`, with the reference of a committed step put under it: whoever committed it, Prefect shows it as cached."""
    key = step_key(context, parameters)
    run, path = opened(parameters["run"]), step_of(context.task.name, parameters)
    if (done := run.store.committed(path, parent=parent_of(parameters))) is not None:
        results = get_result_store()
        results.persist_result_record(results.create_result_record(done, key=key))
    return key


def parent_of(parameters: dict[str, Any]) -> StepRef | None:
    """The step that a task's step is computed from: the first one among its parameters."""
    return next((value for value in parameters.values() if isinstance(value, StepRef)), None)


def durable(name: str) -> Callable[[Callable[..., T]], Task[..., T]]:
    """Decorator of a task that commits the step of this name, or finds it committed; safe to run again at any time."""

    def decorate(function: Callable[..., T]) -> Task[..., T]:
        @wraps(function)
        def body(*arguments: Any, **named: Any) -> T:
            run: RunRef = signature(function).bind(*arguments, **named).arguments["run"]
            with unhurried(opened(run).config.checkpoint.grace_s):
                return function(*arguments, **named)

        return task(
            name=name,
            task_run_name=f"{name}-{{iteration}}" if name in _PER_ITERATION else name,
            retries=3,
            retry_delay_seconds=[1, 30, 120],
            retry_condition_fn=is_transient,
            persist_result=True,
            result_serializer="json",
            cache_key_fn=cache_key,
        )(body)

    return decorate
