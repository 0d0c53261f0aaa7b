"""A toy task on which every algorithm must be seen to learn: its real dataflow over in-process groups, in seconds.

A random model of two layers answers short prompts. The reward of a response is the share of its tokens that are digits,
its cost the share that are odd digits: all digits alike earn most, even digits alone cost nothing.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.batch import Batch
from engine.config import CriticConfig, RunConfig
from engine.controller.dispatch import ROWS_TO_FIRST, dispatch
from engine.controller.layout import roles_of
from engine.controller.local_group import LocalGroup
from engine.controller.worker import Worker, WorkerContext
from engine.dataflows.find import find_dataflow
from engine.dataflows.roles import Progress, Roles
from engine.experience import prompt_batch
from engine.metrics import Metrics
from engine.placement import WORKERS
from engine.workers.critic import CriticWorker
from engine.workers.policy import PolicyWorker
from engine.workers.reference import ReferenceWorker
from engine.workers.reward import RewardWorker
from engine.workers.rollout import RolloutWorker
from tests.helpers.runs import addition, tiny_config

DIGITS, ODD = "0123456789", "13579"


def digits(prompt: str, response: str, answer: str | None, extra: dict[str, Any]) -> float:
    """Share of a response's characters that are digits."""
    return sum(character in DIGITS for character in response) / max(len(response), 1)


def odd_digits(prompt: str, response: str, answer: str | None, extra: dict[str, Any]) -> float:
    """Share of a response's characters that are odd digits."""
    return sum(character in ODD for character in response) / max(len(response), 1)


def toy_config(source: Path, algorithm: dict[str, Any], **sections: Any) -> RunConfig:
    """The task with an algorithm; cost scorers where the algorithm has a use for them."""
    scorer = {"kind": "python", "needs_answer": False}
    constrained = str(algorithm["name"]).startswith("safe")
    defaults: dict[str, Any] = {
        "seed": 5,
        "sft": None,
        "reward": [{**scorer, "function": f"{__name__}:digits"}],
        "cost": [{**scorer, "function": f"{__name__}:odd_digits"}] if constrained else [],
        "rollout": {"samples_per_prompt": 8, "max_response_tokens": 6},
        "train": {"lr": 3e-3, "prompts_per_iteration": 8, "mini_batches": 1, "micro_batch_tokens": 4096},
        "iterations": 20,
        "algorithm": algorithm,
    }
    for name, section in sections.items():
        defaults[name] = {**defaults[name], **section} if isinstance(section, dict) else section
    return tiny_config(source.parent, source, **defaults)


class BackwardsPolicy(PolicyWorker):
    """A policy that is taught the opposite: the sign of every advantage is flipped."""

    @dispatch(ROWS_TO_FIRST)
    def update(self, batch: Batch, normalizers: list[float]) -> Metrics:
        """The update with flipped advantages."""
        return super().update(batch.with_fields(advantages=-batch.advantages), normalizers)


@dataclass(frozen=True)
class Outcome:
    """Mean score and cost of samples (NaN without scorers of cost) before and after, and what it took."""

    start: float
    end: float
    start_cost: float
    end_cost: float
    controllers: dict[str, float]
    seconds: float


@contextmanager
def toy_scorers(source: Path) -> Iterator[dict[str, LocalGroup]]:
    """The reward and cost groups, which all algorithms can share: their processes take seconds to start."""
    config = toy_config(source, {"name": "safe_grpo"})
    with ExitStack() as stack:
        groups = {role: _started(stack, WORKERS[role], role, config, source) for role in ("reward", "cost")}
        for group in groups.values():  # starts the processes
            group.call(RewardWorker.canary, prompt_batch([addition(0)], [0], 0, "canary"))
        yield groups


def learn_toy(
    config: RunConfig, source: Path, scorers: dict[str, LocalGroup], policy: type[Worker] = PolicyWorker
) -> Outcome:
    """Run the algorithm's dataflow for config.iterations; policy: the worker class that learns."""
    began = time.perf_counter()
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # matrices of this size gain nothing from more
        workers = {**WORKERS, "policy": policy}
        own = [role for role in roles_of(config) if role not in scorers]
        groups = {role: _started(stack, workers[role], role, config, source) for role in own}
        roles = Roles(**groups, **{role: scorers[role] for role in roles_of(config) if role in scorers})
        load_toy(roles, config, source)
        flow, progress = find_dataflow(config), Progress(0)
        start = _sampled(roles, config, source.parent)
        for iteration in range(1, config.iterations + 1):
            hand_over(roles, source.parent)
            batch = flow.make_experience(roles, toy_prompts(config, iteration), config)
            learned = flow.learn(roles, batch, config, Progress(iteration, progress.controllers))
            progress = learned.progress
        end = _sampled(roles, config, source.parent)
    return Outcome(start[0], end[0], start[1], end[1], progress.controllers, time.perf_counter() - began)


def start_toy(stack: ExitStack, config: RunConfig, source: Path, names: Iterable[str]) -> Roles:
    """Roles in this process, closed with the stack; their models are not loaded yet."""
    return Roles(**{name: _started(stack, WORKERS[name], name, config, source) for name in names})


def _started(stack: ExitStack, worker: type[Worker], role: str, config: RunConfig, source: Path) -> LocalGroup:
    group = LocalGroup(worker, WorkerContext(role, 0, 1, config, source))
    stack.callback(group.close)
    return group


def load_toy(roles: Roles, config: RunConfig, source: Path) -> None:
    """Weights and optimisers of all roles: everything from the run's seed; the reference from the policy's own start."""
    train, steps = config.train, config.iterations * config.train.mini_batches * config.train.epochs
    roles.policy.call(PolicyWorker.load, str(source), "random", train, steps)
    folder = source.parent / "start" / "policy"
    roles.policy.call(PolicyWorker.save, str(folder), str(source), False)
    if roles.reference is not None:
        roles.reference.call(ReferenceWorker.load, str(folder), "pretrained", None, 1)
    for critic in (roles.critic, roles.cost_critic):
        if critic is not None:
            assert isinstance(config.algorithm, CriticConfig)
            optimizer = train.model_copy(update={"lr": config.algorithm.critic_lr or 10 * train.lr})
            critic.call(CriticWorker.load, str(folder), "pretrained", optimizer, steps)


def hand_over(roles: Roles, folder: Path) -> None:
    """Let the engine serve the present policy."""
    handle = roles.policy.call(PolicyWorker.publish, str(folder), 0)
    roles.rollout.call(RolloutWorker.receive, handle)
    roles.policy.call(PolicyWorker.retract, handle)


def toy_prompts(config: RunConfig, draw: int) -> Batch:
    """Prompts of every draw that the algorithm may make."""
    size = config.train.prompts_per_iteration * config.algorithm.rounds
    positions = range(draw * size, (draw + 1) * size)
    return prompt_batch([addition(position % 25) for position in positions], positions, config.seed, "toy")


def _sampled(roles: Roles, config: RunConfig, folder: Path) -> tuple[float, float]:
    """Mean score and mean cost of 200 samples of the present policy."""
    hand_over(roles, folder)
    prompts = prompt_batch([addition(index) for index in range(25)], range(25), config.seed, "toy evaluation")
    batch = roles.rollout.call(RolloutWorker.generate, prompts.repeat(8))
    scores = roles.reward.call(RewardWorker.score, batch).scores
    costs = roles.cost.call(RewardWorker.score, batch).costs if roles.cost is not None else torch.full((1,), torch.nan)
    return float(scores.mean()), float(costs.mean())
