"""What a run would do next: which of its steps are committed and will be reused, which one comes first, how long is left."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from engine.offlineconfig import committed_steps, measured_steps
from engine.store import StepRef, Store, step_path

_RECENT = 10  # iterations whose pace tells how long the rest takes


@dataclass(frozen=True)
class Outlook:
    """reused: committed steps in their order; next: the first one to be run, None = none is left."""

    reused: tuple[str, ...]
    next: str | None

    @property
    def text(self) -> str:
        """The plan in one line, for people."""
        first = f"first step to run: {self.next}" if self.next else "every step is committed"
        return f"{len(self.reused)} steps are reused ({_shortly(self.reused) or 'none'}); {first}"


def steps_of(config: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    """(step, the step that it is computed from) of a whole run, in their order; config: as recorded in run.json."""
    yield "data", None
    yield "start", "data"
    yield step_path("evaluation", 0), "start"
    on_fixed_rows = "objective" in config
    yield from _on_fixed_rows(config) if on_fixed_rows else _iterations(config)
    yield "gate", step_path("evaluation", config["steps" if on_fixed_rows else "iterations"])
    if config["registry"] is not None:
        yield "registration", "gate"


def _iterations(config: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    every, last = config["evaluation"]["every"], config["iterations"]
    policy = "start"
    for iteration in range(1, last + 1):
        experience = step_path("rollout", iteration)
        yield experience, policy
        policy = step_path("train", iteration)
        yield policy, experience
        if iteration == last or (every is not None and iteration % every == 0):
            yield step_path("evaluation", iteration), policy


def _on_fixed_rows(config: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Stretches of optimiser steps, each named by the last of them; measured ones are committed too."""
    model, every, last = "start", config["evaluation"]["every"], config["steps"]
    measured = measured_steps(last, every)
    for step in committed_steps(last, config["checkpoint"]["every"], every):
        model, before = step_path("train", step), model
        yield model, before
        if step in measured:
            yield step_path("evaluation", step), model


def outlook(store: Store, config: dict[str, Any]) -> Outlook:
    """Which steps of a run can be reused, each checked against the one it was computed from."""
    done: dict[str, StepRef] = {}
    missing = None
    for step, parent in steps_of(config):
        reference = store.committed(step, parent=done[parent] if parent else None) if parent in (None, *done) else None
        if reference is not None:
            done[step] = reference
        elif missing is None:
            missing = step
    return Outlook(tuple(done), missing)


def seconds_left(store: Store, done: int, planned: int) -> float | None:
    """Time that the iterations still to come will take at the pace of the last ones; None = too few are done to tell.

    The median over recent iterations: the pause before a run was continued is no part of its pace.
    """
    recent = range(max(1, done - _RECENT), done + 1)
    steps = [store.committed(step_path("train", iteration)) for iteration in recent]
    times = [store.manifest(step).committed_at for step in steps if step is not None]
    paces = [later - earlier for earlier, later in pairwise(times)]
    return median(paces) * (planned - done) if paces else None


def _shortly(steps: tuple[str, ...]) -> str:
    """data, start, evaluation of 0 and 2, iterations 1 to 3 ..."""
    trained = [step for step in steps if step.endswith("/train")]
    names = [step for step in steps if not step.startswith("iterations/")]
    if not trained:
        return ", ".join([*names, *(step for step in steps if step.startswith("iterations/"))])
    last = max(int(step.split("/")[1]) for step in trained)
    beyond = [step for step in steps if step.startswith("iterations/") and int(step.split("/")[1]) > last]
    return ", ".join([*names, f"iterations 1 to {last}" if last > 1 else "iteration 1", *beyond])
