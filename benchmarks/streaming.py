"""Seconds of generating and scoring a batch: scored while the rest is generated, and scored once all of it is there.

Usage: python benchmarks/streaming.py [--responses 64] [--rounds 3]
A worker on Ray finishes a response every 60 ms, in place of an engine; the reward is a Python function that takes 50 ms for each,
in one scorer process. The two ways take turns, so that a busy moment of the machine falls on both.
"""

import argparse
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from engine.batch import Batch
from engine.config import PythonReward, RunConfig
from engine.controller.cluster import cluster
from engine.controller.dispatch import DP, dispatch
from engine.controller.layout import PoolPlan
from engine.controller.mesh import Mesh
from engine.controller.pool import Pool
from engine.controller.ray_group import Builds, HostSet, RayGroup
from engine.controller.worker import Worker, WorkerContext
from engine.workers.reward import RewardWorker

GENERATION_S, SCORING_S, CALL_S = 0.06, 0.05, 300.0


class PacedEngine(Worker):
    """Finishes one response after the other."""

    shows_rows = True

    @dispatch(DP)
    def generate(self, prompts: Batch) -> Batch:
        """The rows with a response of one character."""
        lengths = torch.ones(len(prompts), dtype=torch.int64)
        answered = prompts.with_fields(response_lengths=lengths).with_columns(response=["x"] * len(prompts))
        for row in range(len(prompts)):
            time.sleep(GENERATION_S)
            self.show_row(row, answered.index)
        return answered


def slow_score(**_: Any) -> float:
    """What a judge or a test run in a sandbox might take."""
    time.sleep(SCORING_S)
    return 1.0


def role(stack: ExitStack, builds: Builds, name: str, worker: type[Worker], *rewards: PythonReward) -> RayGroup:
    """A role of one rank in a process of its own."""
    pool = stack.enter_context(Pool(name, PoolPlan(1, {"CPU": 0.5}), 1, CALL_S))
    hosts = HostSet(name, pool, 1, "benchmark", CALL_S, builds, shows_rows=worker.shows_rows)
    stack.callback(hosts.close)
    config = cast(RunConfig, SimpleNamespace(reward=rewards, cost=()))
    hosts.add(worker, [WorkerContext(name, 0, 1, config, Path())])
    return RayGroup(name, hosts, Mesh())


def prompts(count: int) -> Batch:
    """Prompts of two tokens."""
    fields = {"input_ids": torch.ones(count, 2, dtype=torch.int64), "prompt_lengths": torch.full((count,), 2)}
    return Batch(fields, {"prompt": ["p"] * count, "answer": [None] * count, "extra": [{}] * count})


def seconds(engine: RayGroup, reward: RayGroup, count: int, *, streamed: bool) -> float:
    """From the first prompt to the last score."""
    started = time.perf_counter()
    generated = engine.submit(PacedEngine.generate, prompts(count))
    reward.call(RewardWorker.score, generated if streamed else generated.result())
    return time.perf_counter() - started


def main() -> None:
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--responses", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    function = PythonReward(function=f"{Path(__file__).stem}:slow_score", needs_answer=False)
    found: dict[bool, list[float]] = {True: [], False: []}
    with cluster("benchmark"), ExitStack() as stack:
        builds = Builds()
        stack.callback(builds.watch.close)
        engine = role(stack, builds, "rollout", PacedEngine)
        reward = role(stack, builds, "reward", RewardWorker, function)
        seconds(engine, reward, 1, streamed=True)  # whatever is started once
        for _ in range(arguments.rounds):
            for streamed, measured in found.items():
                measured.append(seconds(engine, reward, arguments.responses, streamed=streamed))
    count = arguments.responses
    print(f"{count} responses, median of {arguments.rounds} rounds after one to warm up\n")
    print("| scored | s |\n|---|---|")
    print(f"| while others are generated | {statistics.median(found[True]):.2f} |")
    print(f"| once all are generated | {statistics.median(found[False]):.2f} |")
    print(f"| (generation alone, scoring alone) | {count * GENERATION_S:.2f}, {count * SCORING_S:.2f} |")


if __name__ == "__main__":
    main()
