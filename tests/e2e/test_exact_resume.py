"""Runs that were killed end bit for bit like one that was not: weights, optimiser, samples, metrics, with vLLM and DeepSpeed."""

import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.store import MANIFEST, step_path
from tests.helpers.command import SECONDS, SMOKE, result_of, start
from tests.helpers.outcomes import outcome

pytestmark = pytest.mark.timeout(900)
PPO = ("algorithm={name: ppo, kl_coef: 0.05}",)


@dataclass(frozen=True)
class Kill:
    """At which moment a run is killed: step `after` is committed, step `during` is not yet."""

    after: str
    during: str


IN_A_ROLLOUT = Kill(step_path("train", 1), step_path("rollout", 2))
IN_TRAINING = Kill(step_path("rollout", 3), step_path("train", 3))


@dataclass(frozen=True)
class Case:
    """A configuration and the moments at which it is killed, one after the other."""

    options: tuple[str, ...]
    kills: tuple[Kill, ...]

    def arguments(self, run_key: str) -> list[str]:
        options = [part for option in self.options for part in ("--set", option)]
        return ["run", str(SMOKE), "--run-key", run_key, *options]


BOTH = (IN_A_ROLLOUT, IN_TRAINING)
SHORT = {
    "grpo": Case(("seed=7", "registry=null"), BOTH),
    "ppo, weights every fourth iteration": Case(
        (*PPO, "seed=8", "registry=null", "iterations=5", "checkpoint.every=4"), (IN_TRAINING,)
    ),
}
LONG = {
    "grpo, another seed": Case(("seed=8", "registry=null"), BOTH),
    "grpo, weights every fourth iteration": Case(
        ("seed=9", "registry=null", "iterations=6", "checkpoint.every=4"), (*BOTH, Kill("iterations/00005/rollout", ""))
    ),
    "ppo": Case((*PPO, "seed=7", "registry=null"), BOTH),
    "ppo, another seed": Case((*PPO, "seed=8", "registry=null"), BOTH),
}


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name, marks=pytest.mark.long) for name, case in SHORT.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.exhaustive) for name, case in LONG.items()),
    ],
)
def test_a_killed_run_ends_like_an_undisturbed_one(case: Case, tmp_path: Path) -> None:
    whole = result_of(*case.arguments("whole"), cwd=tmp_path)
    for kill in case.kills:
        be_killed(case.arguments("killed"), kill, tmp_path)
    resumed = result_of("resume", "killed", cwd=tmp_path)
    assert resumed["iterations_reused"] >= 1
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    expected = outcome(tmp_path / "runs", "whole")
    assert len(expected) >= 2 * resumed["iterations_planned"]
    assert outcome(tmp_path / "runs", "killed") == expected


def be_killed(arguments: list[str], kill: Kill, cwd: Path) -> None:
    """Start or continue a run and kill its driver with SIGKILL at this moment."""
    process = start(*arguments, cwd=cwd)
    try:
        folder, deadline = cwd / "runs" / "killed", time.monotonic() + SECONDS
        while not (folder / kill.after / MANIFEST).exists():
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline, f"{kill.after} was not committed"
            time.sleep(0.005)
    finally:
        process.kill()
        process.communicate(timeout=SECONDS)
    assert not kill.during or not (folder / kill.during / MANIFEST).exists(), f"{kill.during} was too fast"
