"""Kills random processes of a run at random moments, from a seed, until it is done; and says what each kill cost."""

import json
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

from engine.controller.ray_group import ROLES_TAG, RUN_TAG
from engine.store import MANIFEST
from tests.helpers.command import SECONDS, SMOKE, start

VICTIMS = ("driver", "worker", "rollout", "raylet", "gcs", "prefect")
IN_FLIGHT_S = 0.3  # a step whose commit was under way at the kill is no sign of recovery
EARLIEST, LATEST = 0.05, 1.5  # iterations after a training step was committed


@dataclass(frozen=True)
class Blow:
    """One kill: who, in which iteration, and how long until the run was training again."""

    victim: str
    iteration: int  # training steps committed before
    moment_s: float  # after the training step before
    resumed: bool  # by the command; else the run went on by itself
    recovery_s: float  # from the kill to the next committed training step
    lost: int  # committed rollouts that were made a second time


class Chaos:
    """A run of the smoke preset below a folder, disturbed `kills` times."""

    def __init__(self, folder: Path, run_key: str, options: tuple[str, ...], seed: int) -> None:
        self._cwd, self._key, self._draw = folder, run_key, random.Random(seed)
        self._folder = folder / "runs" / run_key
        settings = [part for option in options for part in ("--set", option)]
        self._process = start("run", str(SMOKE), "--run-key", run_key, *settings, cwd=folder)

    def suffer(self, kills: int, victims: tuple[str, ...] = VICTIMS) -> list[Blow]:
        """Kill so many processes, each after some more training, and let the run end. What every kill cost."""
        order = [victim for _ in range(-(-kills // len(victims))) for victim in self._shuffled(victims)]
        blows = [blow for victim in order[:kills] if (blow := self._strike(victim)) is not None]
        self._until(lambda: self._process.poll() is not None)
        assert self._process.returncode == 0, self._said()
        return blows

    def _shuffled(self, victims: tuple[str, ...]) -> list[str]:
        return self._draw.sample(victims, len(victims))

    def _strike(self, victim: str) -> Blow | None:
        """Kill one process and wait until another training step is committed; None if the run was faster."""
        before = self._steps("train")
        self._until(lambda: self._steps("train") > before or self._ended_well())
        moment = self._draw.uniform(EARLIEST, LATEST) * self._pace()
        time.sleep(moment)
        if self._ended_well() or (target := self._find(victim)) is None:
            return None
        rollouts, killed = self._manifests("rollout"), time.monotonic()
        target.send_signal(signal.SIGKILL)
        time.sleep(IN_FLIGHT_S)
        steps = self._steps("train")
        resumed = self._recover(steps)
        lost = sum(self._manifests("rollout").get(path) != content for path, content in rollouts.items())
        return Blow(victim, steps, moment, resumed, time.monotonic() - killed, lost)

    def _recover(self, steps: int) -> bool:
        """Until the next training step; a run whose command has ended is resumed, as an operator would. Whether it was."""
        resumed = False
        deadline = time.monotonic() + SECONDS
        while self._steps("train") <= steps and not self._ended_well():
            assert time.monotonic() < deadline, self._said()
            if self._process.poll() is not None:
                self._process.communicate()
                self._process = start("resume", self._key, cwd=self._cwd)
                resumed = True
            time.sleep(0.02)
        return resumed

    def _find(self, victim: str) -> psutil.Process | None:
        driver = psutil.Process(self._process.pid)
        if victim == "driver":
            return driver
        wanted: dict[str, Callable[[psutil.Process], bool]] = {
            "worker": lambda process: _tags(process).get(ROLES_TAG, "").startswith("policy"),
            "rollout": lambda process: _tags(process).get(ROLES_TAG) == "rollout",
            "raylet": lambda process: process.name() == "raylet",
            "gcs": lambda process: process.name() == "gcs_server",
            "prefect": lambda process: "tasks.embedded_server" in process.cmdline(),
        }
        for process in driver.children(recursive=True):
            try:
                if wanted[victim](process):
                    return process
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return None

    def _pace(self) -> float:
        """Seconds of a quick iteration: a fast machine must not be done before it is disturbed."""
        trained = [json.loads(text) for text in self._manifests("train").values()]
        gaps = [after["committed_at"] - before["committed_at"] for before, after in pairwise(trained)]
        return min(gaps, default=trained[0]["metrics"]["time/step_s"])

    def _steps(self, kind: str) -> int:
        return len(self._manifests(kind))

    def _manifests(self, kind: str) -> dict[str, str]:
        files = sorted(self._folder.glob(f"iterations/*/{kind}/{MANIFEST}"))
        return {str(file.relative_to(self._folder)): file.read_text() for file in files}

    def _ended_well(self) -> bool:
        return self._process.poll() == 0

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, self._said()
            time.sleep(0.02)

    def _said(self) -> str:
        return (self._cwd / "command.err").read_text()[-4000:]


def _tags(process: psutil.Process) -> dict[str, str]:
    environment = process.environ()
    return environment if RUN_TAG in environment else {}
