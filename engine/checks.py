"""Rules between options: what each option allows alone is in config.py, what they allow together is here."""

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from engine.algorithmchecks import ALGORITHM_RULES
from engine.commonchecks import COMMON_RULES, Rule, apply_rules, overlap
from engine.config import CriticConfig, CustomConfig, LengthPenaltyReward, RunConfig, component_names
from engine.controller.layout import layout, ranks_of
from engine.errors import Problem
from engine.placement_checks import LAYOUT, MACHINE_RULES, PLACEMENT_RULES
from engine.reward.checks import check_module, check_rewards
from engine.trainchecks import TRAIN_RULES

_VLLM_ONLY = ("kv_cache_gib", "gpu_memory_utilization", "max_batched_tokens", "tensor_parallel")


def check_config(config: RunConfig, unknown: Collection[str] = (), *, elsewhere: bool = False) -> list[Problem]:
    """Everything that does not fit together, each with key, value and remedy.

    unknown: options whose values in `config` mean nothing because they could not be parsed; rules that read them are
    left out. elsewhere: the run is planned for another machine, so rules that look at this one are left out.
    """
    problems = apply_rules(_RULES if elsewhere else (*_RULES, *_RULES_OF_THIS_MACHINE), config, unknown)
    scorers = check_rewards(config.reward, "reward", elsewhere=elsewhere)
    scorers += check_rewards(config.cost, "cost", elsewhere=elsewhere)
    problems += [item for item in scorers if not any(overlap(item.key, name) for name in unknown)]
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
    return config.policy_steps


def processes(config: RunConfig) -> dict[str, int]:
    """CPUs or GPUs that each pool of processes takes; local runs take none."""
    return {name: pool.ranks * pool.devices for name, pool in layout(config).pools.items()}


def _copies(config: RunConfig) -> int:
    """Most ranks that the samples of one optimiser step are dealt to; those of one copy of the model share theirs."""
    return (
        max(ranks_of(config, role) // config.train.tensor_parallel for role in ("policy", *config.algorithm.critics))
        or 1
    )


def _mini_batches(config: RunConfig) -> Iterator[Problem]:
    samples, parts = config.samples_per_iteration, config.train.mini_batches
    made = f"{config.train.prompts_per_iteration} prompts x {config.rollout.samples_per_prompt} samples = {samples}"
    if samples % parts:
        yield Problem("train.mini_batches", parts, f"does not divide {made}; use a divisor of {samples}")
    elif samples // parts < _copies(config):
        remedy = f"leaves {samples // parts} samples ({made}) for {_copies(config)} ranks; use fewer mini-batches"
        yield Problem("train.mini_batches", parts, remedy)


def _backends(config: RunConfig) -> Iterator[Problem]:
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


def _engine_devices(config: RunConfig) -> Iterator[Problem]:
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


def _gate_components(config: RunConfig) -> Iterator[Problem]:
    component, names = config.gate.component, component_names(config.reward)
    if component is not None and component not in names:
        yield Problem("gate.component", component, f"is no reward of this run; use one of {', '.join(names)}")
    ceiling, cost, costs = config.gate.max_cost, config.gate.cost_component, component_names(config.cost)
    if ceiling is not None and not config.cost:
        yield Problem("gate.max_cost", ceiling, "this run has no scorers of cost; give cost, or leave it out")
    if cost is not None and ceiling is None:
        yield Problem("gate.cost_component", cost, "has no use without gate.max_cost; give that, or leave it out")
    elif cost is not None and cost not in costs:
        yield Problem("gate.cost_component", cost, f"is no cost of this run; it has {', '.join(costs) or 'none'}")


def _warmups(config: RunConfig) -> Iterator[Problem]:
    if isinstance(config.algorithm, CriticConfig) and config.algorithm.critic_warmup >= config.iterations:
        remedy = f"the policy would never learn in {config.iterations} iterations; use fewer"
        yield Problem("algorithm.critic_warmup", config.algorithm.critic_warmup, remedy)
    elif config.train.warmup_steps >= total_steps(config):
        remedy = f"the policy takes {total_steps(config)} optimiser steps, fewer than its warm-up; use fewer"
        yield Problem("train.warmup_steps", config.train.warmup_steps, remedy)


def _sft(config: RunConfig) -> Iterator[Problem]:
    if config.sft is None:
        return
    if config.sft.warmup_steps >= config.sft.steps:
        remedy = f"sft has {config.sft.steps} steps, fewer than its warm-up; use fewer"
        yield Problem("sft.warmup_steps", config.sft.warmup_steps, remedy)
    if config.sft.batch_size < _copies(config):
        remedy = f"is fewer rows than the {_copies(config)} data-parallel ranks; use at least that many"
        yield Problem("sft.batch_size", config.sft.batch_size, remedy)


def _stop(config: RunConfig) -> Iterator[Problem]:
    if "" in config.rollout.stop:
        yield Problem("rollout.stop", list(config.rollout.stop), "an empty text ends every response at once; remove it")


def _weights(config: RunConfig) -> Iterator[Problem]:
    for section, components in (("reward", config.reward), ("cost", config.cost)):
        if components and all(component.weight == 0 for component in components):
            remedy = f"every component of {section} weighs nothing, so every score would be 0; raise one"
            yield Problem(f"{section}[0].weight", 0.0, remedy)


def _length_penalty(config: RunConfig) -> Iterator[Problem]:
    longest = config.rollout.max_response_tokens
    sections = [("reward", number, one) for number, one in enumerate(config.reward)]
    sections += [("cost", number, one) for number, one in enumerate(config.cost)]
    for section, number, one in sections:
        if isinstance(one, LengthPenaltyReward) and one.max_tokens - one.buffer_tokens >= longest:
            remedy = f"no response is longer than rollout.max_response_tokens, {longest}, so none would be penalised"
            yield Problem(f"{section}[{number}].max_tokens", one.max_tokens, remedy)


def _own_dataflow(config: RunConfig) -> Iterator[Problem]:
    if isinstance(config.algorithm, CustomConfig):
        yield from check_module("algorithm.dataflow", config.algorithm.dataflow)


_RULES: tuple[Rule[RunConfig], ...] = (
    (
        _mini_batches,
        (
            "train.mini_batches",
            "train.prompts_per_iteration",
            "rollout.samples_per_prompt",
            "train.tensor_parallel",
            *LAYOUT,
        ),
    ),
    *PLACEMENT_RULES,  # an unknown algorithm has at least the roles of the default one
    (_backends, ("rollout.backend",)),
    (_engine_room, ("rollout", "data.max_prompt_tokens")),
    (_gate_suite, ("gate.suite", "evaluation.suites")),
    (_gate_components, ("gate", "reward", "cost")),
    (_warmups, ("algorithm", "train", "iterations")),
    (_sft, ("sft", "train.tensor_parallel", *LAYOUT)),
    (_stop, ("rollout.stop",)),
    (_weights, ("reward", "cost")),
    (_length_penalty, ("reward", "cost", "rollout")),
    *COMMON_RULES,
    (_own_dataflow, ("algorithm",)),
    *ALGORITHM_RULES,
    *TRAIN_RULES,
)
_RULES_OF_THIS_MACHINE: tuple[Rule[RunConfig], ...] = (
    *MACHINE_RULES,
    (_engine_devices, ("rollout",)),
)
