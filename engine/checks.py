"""Rules between options: what each option allows alone is in config.py, what they allow together is here."""

import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from engine.config import GRPOConfig, PPOConfig, RunConfig
from engine.errors import Problem
from engine.reward.checks import check_rewards

_VLLM_ONLY = ("kv_cache_gib", "gpu_memory_utilization", "max_batched_tokens", "tensor_parallel")


def check_config(config: RunConfig, unknown: Collection[str] = ()) -> list[Problem]:
    """Everything that does not fit together, each with key, value and remedy.

    unknown: options whose values in `config` mean nothing because they could not be parsed; rules that read them are
    left out.
    """
    problems: list[Problem] = []
    for rule, keys in _RULES:
        if not any(_overlap(key, name) for key in keys for name in unknown):
            problems += rule(config)
    problems += [item for item in check_rewards(config.reward) if not any(_overlap(item.key, name) for name in unknown)]
    return problems


def check_sizes(config: RunConfig, train_rows: int, eval_rows: int) -> list[Problem]:
    """What does not fit the number of rows that are left after filtering."""
    problems = []
    wanted = config.train.prompts_per_iteration
    if wanted > train_rows:
        remedy = f"the training data has {train_rows} rows; use at most {train_rows}, or more data"
        problems.append(Problem("train.prompts_per_iteration", wanted, remedy))
    if eval_rows == 0 and any(not suite.data for suite in config.evaluation.suites):
        remedy = (
            f"no row is left to evaluate on ({train_rows} training rows); give data.eval or raise data.eval_fraction"
        )
        problems.append(Problem("data.eval", eval_rows, remedy))
    return problems


def plan_steps(config: RunConfig) -> dict[str, int]:
    """How much the run will do: iterations, optimiser steps, samples and tokens at most, evaluations, processes."""
    samples = config.iterations * config.samples_per_iteration
    every = config.evaluation.every or config.iterations
    return {
        "iterations": config.iterations,
        "sft_steps": config.sft.steps if config.sft else 0,
        "optimiser_steps": total_steps(config),
        "samples_per_iteration": config.samples_per_iteration,
        "samples": samples,
        "response_tokens_at_most": samples * config.rollout.max_response_tokens,
        "tokens_at_most": samples * (config.data.max_prompt_tokens + config.rollout.max_response_tokens),
        "evaluations": 1 + -(-config.iterations // every),
        "processes": sum(processes(config).values()),
    }


def total_steps(config: RunConfig) -> int:
    """Optimiser steps of the policy in the whole run, supervised fine-tuning aside."""
    return config.iterations * config.train.epochs * config.train.mini_batches


def processes(config: RunConfig) -> dict[str, int]:
    """CPUs or GPUs that each pool of processes takes; local runs take none."""
    placement = config.placement
    if placement.mode == "local":
        return {}
    if placement.mode == "colocate":
        return {"shared": max(placement.ranks, placement.rollout_ranks)}
    if placement.mode == "split":
        return {"rollout": placement.rollout_ranks, "train": placement.ranks}
    others = ["policy", "reward"]
    others += ["reference"] if config.needs_reference else []
    others += ["critic"] if isinstance(config.algorithm, PPOConfig) else []
    return {"rollout": placement.rollout_ranks, **dict.fromkeys(others, placement.ranks)}


def _group_size(config: RunConfig) -> Iterator[Problem]:
    if isinstance(config.algorithm, GRPOConfig) and config.rollout.samples_per_prompt == 1:
        remedy = "grpo compares the samples of a prompt and learns nothing from one; use at least 2, or algorithm ppo"
        yield Problem("rollout.samples_per_prompt", 1, remedy)


def _mini_batches(config: RunConfig) -> Iterator[Problem]:
    samples, parts = config.samples_per_iteration, config.train.mini_batches
    made = f"{config.train.prompts_per_iteration} prompts x {config.rollout.samples_per_prompt} samples = {samples}"
    if samples % parts:
        yield Problem("train.mini_batches", parts, f"does not divide {made}; use a divisor of {samples}")
    elif samples // parts < config.placement.ranks:
        remedy = (
            f"leaves {samples // parts} samples ({made}) for {config.placement.ranks} ranks; use fewer mini-batches"
        )
        yield Problem("train.mini_batches", parts, remedy)


def _truncated_sampling(config: RunConfig) -> Iterator[Problem]:
    remedy = (
        "samples come from a cut distribution that the trainer does not know; "
        "set algorithm.correction.mode (token is the usual one), or sample from all tokens"
    )
    if config.algorithm.correction.mode == "none" and config.rollout.top_p < 1.0:
        yield Problem("rollout.top_p", config.rollout.top_p, remedy)
    if config.algorithm.correction.mode == "none" and config.rollout.top_k > 0:
        yield Problem("rollout.top_k", config.rollout.top_k, remedy)


def _correction(config: RunConfig) -> Iterator[Problem]:
    correction = config.algorithm.correction
    if correction.mode == "none":
        for name in sorted({"cap", "floor"} & correction.model_fields_set):
            remedy = "has no use with correction.mode: none; choose a mode, or leave it out"
            yield Problem(f"algorithm.correction.{name}", correction.model_dump()[name], remedy)
    elif correction.floor is not None and correction.floor > correction.cap:
        yield Problem("algorithm.correction.floor", correction.floor, f"is above cap = {correction.cap}; lower it")


def _placement(config: RunConfig) -> Iterator[Problem]:
    asked, available = processes(config), os.cpu_count() or 1
    if "RAY_ADDRESS" not in os.environ and sum(asked.values()) > available:
        pools = ", ".join(f"{name} {count}" for name, count in asked.items())
        remedy = (
            f"asks for {sum(asked.values())} processes ({pools}), this machine has {available} CPUs; "
            "lower placement.ranks and rollout_ranks, use mode colocate, or set RAY_ADDRESS to a larger cluster"
        )
        yield Problem("placement.mode", config.placement.mode, remedy)


def _local(config: RunConfig) -> Iterator[Problem]:
    if config.placement.mode == "local":
        for name, value in (("ranks", config.placement.ranks), ("rollout_ranks", config.placement.rollout_ranks)):
            if value != 1:
                yield Problem(f"placement.{name}", value, "mode local is one process; use 1, or another mode")


def _backends(config: RunConfig) -> Iterator[Problem]:
    if config.train.backend == "torch" and config.train.zero_stage:
        yield Problem("train.zero_stage", config.train.zero_stage, "needs train.backend: deepspeed; use it, or stage 0")
    if config.rollout.backend == "hf":
        for name in _VLLM_ONLY:
            if name in config.rollout.model_fields_set:
                value = config.rollout.model_dump()[name]
                yield Problem(f"rollout.{name}", value, "is an option of backend vllm only; leave it out")


def _engine_room(config: RunConfig) -> Iterator[Problem]:
    room, longest = (
        config.rollout.max_batched_tokens,
        config.data.max_prompt_tokens + config.rollout.max_response_tokens,
    )
    if room is not None and room < longest:
        yield Problem("rollout.max_batched_tokens", room, f"must hold one whole sample of {longest} tokens; raise it")
    cuda = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
    if config.rollout.tensor_parallel > 1 and not cuda and "RAY_ADDRESS" not in os.environ:
        yield Problem(
            "rollout.tensor_parallel", config.rollout.tensor_parallel, "needs CUDA devices, found none; use 1"
        )


def _gate_suite(config: RunConfig) -> Iterator[Problem]:
    names = [suite.name for suite in config.evaluation.suites]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Problem(f"evaluation.suites[{index}].name", name, "another suite has this name; rename one")
    if config.gate.suite not in names:
        yield Problem(
            "gate.suite", config.gate.suite, f"is no evaluation suite; use one of {', '.join(sorted(set(names)))}"
        )


def _kl(config: RunConfig) -> Iterator[Problem]:
    algorithm = config.algorithm
    if not isinstance(algorithm, PPOConfig):
        if "kl_loss_kind" in algorithm.model_fields_set and algorithm.kl_loss_coef == 0:
            remedy = "has no use with kl_loss_coef 0; set the coefficient, or leave it out"
            yield Problem("algorithm.kl_loss_kind", algorithm.kl_loss_kind, remedy)
        return
    if algorithm.kl_target is not None and algorithm.kl_coef == 0:
        remedy = "adapts kl_coef, which is 0 and stays so; give kl_coef a start value, or leave the target out"
        yield Problem("algorithm.kl_target", algorithm.kl_target, remedy)
    if algorithm.kl_target is None and "kl_horizon" in algorithm.model_fields_set:
        remedy = "is used by the adaptive coefficient only; set kl_target, or leave it out"
        yield Problem("algorithm.kl_horizon", algorithm.kl_horizon, remedy)


def _warmups(config: RunConfig) -> Iterator[Problem]:
    if isinstance(config.algorithm, PPOConfig) and config.algorithm.critic_warmup >= config.iterations:
        remedy = f"the policy would never learn in {config.iterations} iterations; use fewer"
        yield Problem("algorithm.critic_warmup", config.algorithm.critic_warmup, remedy)
    if config.train.warmup_steps >= total_steps(config):
        remedy = f"the run has {total_steps(config)} optimiser steps, fewer than its warm-up; use fewer"
        yield Problem("train.warmup_steps", config.train.warmup_steps, remedy)


def _sft(config: RunConfig) -> Iterator[Problem]:
    if config.sft is None:
        return
    if config.sft.warmup_steps >= config.sft.steps:
        remedy = f"sft has {config.sft.steps} steps, fewer than its warm-up; use fewer"
        yield Problem("sft.warmup_steps", config.sft.warmup_steps, remedy)
    if config.sft.batch_size < config.placement.ranks:
        remedy = f"is fewer rows than placement.ranks = {config.placement.ranks}; use at least that many"
        yield Problem("sft.batch_size", config.sft.batch_size, remedy)


def _optimisers(config: RunConfig) -> Iterator[Problem]:
    for name, optimiser in (("train", config.train), ("sft", config.sft)):
        if optimiser is not None and max(optimiser.betas) >= 1.0:
            yield Problem(
                f"{name}.betas", list(optimiser.betas), "an average that forgets nothing never starts; use less than 1"
            )


def _retention(config: RunConfig) -> Iterator[Problem]:
    checkpoint = config.checkpoint
    if config.evaluation.every is None and "keep_best" in checkpoint.model_fields_set and checkpoint.keep_best > 0:
        remedy = "nothing is scored between start and end; set evaluation.every, or leave it out"
        yield Problem("checkpoint.keep_best", checkpoint.keep_best, remedy)


def _unused_data(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    if data.eval and "eval_fraction" in data.model_fields_set:
        yield Problem(
            "data.eval_fraction", data.eval_fraction, "has no use where data.eval is given; remove one of the two"
        )
    if data.bad_lines == "error" and "max_bad_share" in data.model_fields_set:
        yield Problem("data.max_bad_share", data.max_bad_share, "needs data.bad_lines: skip; set that, or leave it out")


def _stop(config: RunConfig) -> Iterator[Problem]:
    if "" in config.rollout.stop:
        yield Problem("rollout.stop", list(config.rollout.stop), "an empty text ends every response at once; remove it")


def _weights(config: RunConfig) -> Iterator[Problem]:
    if all(reward.weight == 0 for reward in config.reward):
        yield Problem("reward[0].weight", 0.0, "every component weighs nothing, so every score would be 0; raise one")


def _secrets(config: RunConfig) -> Iterator[Problem]:
    uri = config.registry.tracking_uri if config.registry else None
    if uri and (password := urlsplit(uri).password):
        remedy = "holds a password, which would be kept in run.json; give it by MLFLOW_TRACKING_PASSWORD instead"
        yield Problem("registry.tracking_uri", uri.replace(password, "***"), remedy)


def _root(config: RunConfig) -> Iterator[Problem]:
    if "://" in config.root:
        yield Problem("root", config.root, "runs are kept in local folders only; name a folder")


# Each rule with the options it reads.
_RULES: tuple[tuple[Callable[[RunConfig], Iterator[Problem]], tuple[str, ...]], ...] = (
    (_group_size, ("algorithm.name", "rollout.samples_per_prompt")),
    (
        _mini_batches,
        ("train.mini_batches", "train.prompts_per_iteration", "rollout.samples_per_prompt", "placement.ranks"),
    ),
    (_truncated_sampling, ("algorithm.correction", "rollout.top_p", "rollout.top_k")),
    (_correction, ("algorithm.correction",)),
    (_placement, ("placement",)),  # an unknown algorithm has at least the roles of the default one
    (_local, ("placement",)),
    (_backends, ("train.backend", "train.zero_stage", "rollout.backend")),
    (_engine_room, ("rollout", "data.max_prompt_tokens")),
    (_gate_suite, ("gate.suite", "evaluation.suites")),
    (_kl, ("algorithm",)),
    (_warmups, ("algorithm", "train", "iterations")),
    (_sft, ("sft", "placement.ranks")),
    (_optimisers, ("train.betas", "sft")),
    (_retention, ("checkpoint.keep_best", "evaluation.every")),
    (_unused_data, ("data",)),
    (_stop, ("rollout.stop",)),
    (_weights, ("reward",)),
    (_root, ("root",)),
    (_secrets, ("registry",)),
)


def _overlap(key: str, name: str) -> bool:
    """Whether one of two options is the other, or contains it."""
    long, short = (key, name) if len(key) >= len(name) else (name, key)
    return long == short or long.startswith((f"{short}.", f"{short}["))
