"""Rules between the options of a run on fixed rows: what each option allows alone is in offlineconfig.py."""

import os
from collections.abc import Collection, Iterator

from engine.commonchecks import COMMON_RULES, Rule, apply_rules
from engine.errors import Problem
from engine.offlineconfig import SCORE_MODELS, OfflineConfig, committed_steps, measured_steps
from engine.trainchecks import backend_problems, lora_problems, optimizer_problems


def check_offline(config: OfflineConfig, unknown: Collection[str] = (), *, elsewhere: bool = False) -> list[Problem]:
    """Everything that does not fit together, each with key, value and remedy.

    unknown: options whose values mean nothing because they could not be parsed; elsewhere: planned for another machine.
    """
    return apply_rules(_RULES if elsewhere else (*_RULES, (_cpus, ("placement",))), config, unknown)


def check_rows(config: OfflineConfig, train_rows: int, eval_rows: int) -> list[Problem]:
    """What does not fit the number of rows that are left after filtering."""
    problems = []
    if config.train.batch_size > train_rows:
        remedy = f"the training data has {train_rows} usable rows; use at most {train_rows}, or more data"
        problems.append(Problem("train.batch_size", config.train.batch_size, remedy))
    if eval_rows == 0:
        remedy = (
            f"no row is left to measure on ({train_rows} training rows); give data.eval or raise data.eval_fraction"
        )
        problems.append(Problem("data.eval", eval_rows, remedy))
    return problems


def plan_offline(config: OfflineConfig, train_rows: int) -> dict[str, int | float]:
    """How much the run will do: optimiser steps, rows, epochs, tokens at most, measurements, checkpoints, processes."""
    rows = config.steps * config.train.batch_size
    sides = 1 if config.objective.name == "sft" else 2
    points = commit_points(config)
    evaluated = [step for step in points if evaluated_at(config, step)]
    return {
        "optimiser_steps": config.steps,
        "rows": rows,
        "epochs": round(rows / max(train_rows, 1), 2),
        "tokens_at_most": rows * sides * config.data.max_tokens,
        "evaluations": 1 + len(evaluated),
        "checkpoints": len(points),
        "processes": 0 if config.placement.mode == "local" else config.placement.ranks,
    }


def commit_points(config: OfflineConfig) -> list[int]:
    """The optimiser steps after which weights are written."""
    return committed_steps(config.steps, config.checkpoint.every, config.evaluation.every)


def evaluated_at(config: OfflineConfig, step: int) -> bool:
    """Whether the model is measured after this optimiser step."""
    return step in measured_steps(config.steps, config.evaluation.every)


def _optimizer(config: OfflineConfig) -> Iterator[Problem]:
    yield from optimizer_problems("train", config.train)
    if config.train.schedule == "adaptive_kl":
        remedy = "follows the KL of a policy between optimiser steps, which a run on fixed rows does not measure; use another"
        yield Problem("train.schedule", config.train.schedule, remedy)


def _warmup(config: OfflineConfig) -> Iterator[Problem]:
    if config.train.warmup_steps >= config.steps:
        remedy = f"the run has {config.steps} steps, fewer than its warm-up; use fewer"
        yield Problem("train.warmup_steps", config.train.warmup_steps, remedy)


def _backend(config: OfflineConfig) -> Iterator[Problem]:
    yield from backend_problems(config.train)


def _tensor_parallel(config: OfflineConfig) -> Iterator[Problem]:
    size, ranks = config.train.tensor_parallel, config.placement.ranks
    if size > 1 and config.train.backend == "deepspeed":
        remedy = "the deepspeed backend spreads state, not layers; use train.backend: fsdp or torch, or 1"
        yield Problem("train.tensor_parallel", size, remedy)
    if ranks % size:
        allowed = [number for number in range(1, ranks + 1) if ranks % number == 0]
        yield Problem("train.tensor_parallel", size, f"does not divide placement.ranks = {ranks}; use one of {allowed}")


def _adapter(config: OfflineConfig) -> Iterator[Problem]:
    if config.model.lora is None:
        return
    if config.objective.name in SCORE_MODELS:
        remedy = "adapters belong to language models; a model with a score head is trained whole, leave model.lora out"
        yield Problem("model.lora", config.model.lora.model_dump(), remedy)
    yield from lora_problems(config.train)


def _ranks(config: OfflineConfig) -> Iterator[Problem]:
    ranks, batch = config.placement.ranks, config.train.batch_size
    if config.placement.mode == "local" and ranks != 1:
        yield Problem("placement.ranks", ranks, "mode local is one process; use 1, or mode colocate")
    copies = max(ranks // config.train.tensor_parallel, 1)
    if batch < copies:
        yield Problem("train.batch_size", batch, f"leaves ranks without a row; use at least {copies}")


def _lengths(config: OfflineConfig) -> Iterator[Problem]:
    if config.data.max_tokens <= config.data.max_prompt_tokens:
        remedy = (
            f"leaves no token for a completion behind a prompt of data.max_prompt_tokens = {config.data.max_prompt_tokens}; "
            "raise it"
        )
        yield Problem("data.max_tokens", config.data.max_tokens, remedy)


def _keys(config: OfflineConfig) -> Iterator[Problem]:
    """Columns that the objective never reads may not be named."""
    supervised = config.objective.name == "sft"
    unused = ("chosen_key", "rejected_key") if supervised else ("label_key",)
    for name, sources in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        for index, source in enumerate(sources):
            values = source.model_dump()
            for option in (option for option in unused if values[option] is not None):
                remedy = f"is not read by objective {config.objective.name}; leave it out"
                yield Problem(f"{name}[{index}].{option}", values[option], remedy)


def _cpus(config: OfflineConfig) -> Iterator[Problem]:
    ranks, available = config.placement.ranks, os.cpu_count() or 1
    if config.placement.mode != "local" and ranks > available and "RAY_ADDRESS" not in os.environ:
        remedy = f"this machine has {available} CPUs; lower it, or set RAY_ADDRESS to a larger cluster"
        yield Problem("placement.ranks", ranks, remedy)


_RULES: tuple[Rule[OfflineConfig], ...] = (
    (_optimizer, ("train",)),
    (_warmup, ("train.warmup_steps", "steps")),
    (_backend, ("train.backend", "train.zero_stage", "train.offload_optimizer")),
    (_tensor_parallel, ("train.backend", "train.tensor_parallel", "placement")),
    (_adapter, ("model.lora", "train.backend", "train.tensor_parallel", "objective")),
    (_ranks, ("placement", "train.batch_size", "train.tensor_parallel")),
    (_lengths, ("data.max_tokens", "data.max_prompt_tokens")),
    (_keys, ("data.train", "data.eval", "objective")),
    *COMMON_RULES,
)
