"""Rules between the options of the model's training: optimiser, rate, backend, adapter."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from engine.config import EngineConfig, OptimizerConfig, RunConfig
from engine.controller.layout import ranks_of, roles_of
from engine.errors import Problem

Rule = tuple[Callable[[RunConfig], Iterator[Problem]], tuple[str, ...]]

# Which optimisers use an option that not all of them use.
_OPTIMIZERS_WITH = {
    "betas": ("adamw", "adam"),
    "eps": ("adamw", "adam", "rmsprop"),
    "alpha": ("rmsprop",),
    "momentum": ("rmsprop", "sgd"),
    "nesterov": ("sgd",),
}
_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
TRAINED = ("policy", "critic", "reference")  # the roles whose models train.tensor_parallel cuts
_ADAPTIVE = ("kl_target", "lr_min", "lr_max")


def check_division(model: Mapping[str, Any], size: int) -> list[Problem]:
    """What keeps layers of a model with this config.json from being cut over `size` tensor-parallel ranks."""
    problems = []
    for name in _DIVIDED:
        count = model.get(name)
        if isinstance(count, int) and count % size:
            allowed = [number for number in range(1, count + 1) if count % number == 0]
            remedy = f"does not divide {name} = {count} of this model; use one of {allowed}"
            problems.append(Problem("train.tensor_parallel", size, remedy))
    return problems


def _optimizers(config: RunConfig) -> Iterator[Problem]:
    for section, options in (("train", config.train), ("sft", config.sft)):
        if options is not None:
            yield from optimizer_problems(section, options)


def optimizer_problems(section: str, options: OptimizerConfig) -> Iterator[Problem]:
    """Options that the chosen optimiser or schedule does not use, or cannot use so."""
    yield from _unused(section, options)
    yield from _impossible(section, options)


def _unused(section: str, options: OptimizerConfig) -> Iterator[Problem]:
    values, name = options.model_dump(), options.optimizer
    for option, users in _OPTIMIZERS_WITH.items():
        if option in options.model_fields_set and name not in users:
            remedy = f"is an option of {' and '.join(users)}; leave it out with optimizer: {name}"
            yield Problem(f"{section}.{option}", values[option], remedy)
    for option in _ADAPTIVE:
        if option in options.model_fields_set and options.schedule != "adaptive_kl":
            remedy = f"is an option of schedule adaptive_kl; leave it out with schedule: {options.schedule}"
            yield Problem(f"{section}.{option}", values[option], remedy)


def _impossible(section: str, options: OptimizerConfig) -> Iterator[Problem]:
    if options.optimizer in _OPTIMIZERS_WITH["betas"] and max(options.betas) >= 1.0:
        remedy = "an average that forgets nothing never starts; use less than 1"
        yield Problem(f"{section}.betas", list(options.betas), remedy)
    if options.nesterov and options.momentum == 0 and options.optimizer == "sgd":
        yield Problem(
            f"{section}.nesterov", True, f"looks ahead along the momentum, which is 0; set {section}.momentum"
        )
    if options.schedule == "adaptive_kl" and not options.lr_min <= options.lr <= options.lr_max:
        remedy = f"starts outside of lr_min = {options.lr_min} and lr_max = {options.lr_max}; widen them, or move it"
        yield Problem(f"{section}.lr", options.lr, remedy)


def _adaptive_rate(config: RunConfig) -> Iterator[Problem]:
    train = config.train
    if train.schedule == "adaptive_kl":
        if train.kl_target is None:
            remedy = "needs the KL to aim at; set train.kl_target (nats per token, often 0.001 to 0.02)"
            yield Problem("train.schedule", train.schedule, remedy)
        if train.mini_batches * train.epochs == 1:
            remedy = (
                "measures how far the policy moves between the optimiser steps of one iteration; "
                "use at least 2 train.mini_batches or epochs"
            )
            yield Problem("train.schedule", train.schedule, remedy)
    if config.sft is not None and config.sft.schedule == "adaptive_kl":
        remedy = "supervised steps have no earlier policy to measure a KL to; use constant, linear or cosine"
        yield Problem("sft.schedule", config.sft.schedule, remedy)


def _backend(config: RunConfig) -> Iterator[Problem]:
    yield from backend_problems(config.train)


def backend_problems(train: EngineConfig) -> Iterator[Problem]:
    """Options of one backend that stand beside another."""
    if train.backend != "deepspeed":
        if train.zero_stage:
            remedy = f"needs train.backend: deepspeed; use it, or stage 0 with {train.backend}"
            yield Problem("train.zero_stage", train.zero_stage, remedy)
        if train.offload_optimizer:
            yield Problem("train.offload_optimizer", True, "needs train.backend: deepspeed; use it, or leave this out")
        return
    if train.offload_optimizer and train.zero_stage == 0:
        yield Problem("train.offload_optimizer", True, "needs train.zero_stage 1, 2 or 3; use one, or leave this out")


def _tensor_parallel(config: RunConfig) -> Iterator[Problem]:
    size = config.train.tensor_parallel
    if size == 1:
        return
    if config.train.backend == "deepspeed":
        remedy = "the deepspeed backend spreads state, not layers; use train.backend: fsdp or torch, or 1"
        yield Problem("train.tensor_parallel", size, remedy)
    for role in TRAINED:
        if role in roles_of(config) and (ranks := ranks_of(config, role)) % size:
            allowed = [number for number in range(1, ranks + 1) if ranks % number == 0]
            remedy = f"does not divide the {ranks} ranks of {role}; use one of {allowed}, or give it other ranks"
            yield Problem("train.tensor_parallel", size, remedy)


def _lora(config: RunConfig) -> Iterator[Problem]:
    if config.model.lora is not None:
        yield from lora_problems(config.train)


def lora_problems(train: EngineConfig) -> Iterator[Problem]:
    """What keeps an adapter from being trained by this engine."""
    if train.backend == "deepspeed":
        remedy = (
            "the deepspeed backend was not made for frozen weights between trained ones; "
            "use train.backend: torch or fsdp, or leave model.lora out"
        )
        yield Problem("train.backend", train.backend, remedy)
    if train.tensor_parallel > 1:
        remedy = "adapters are not cut over tensor-parallel ranks; use 1, or leave model.lora out"
        yield Problem("train.tensor_parallel", train.tensor_parallel, remedy)


# Each rule with the options it reads.
TRAIN_RULES: tuple[Rule, ...] = (
    (_optimizers, ("train", "sft")),
    (_adaptive_rate, ("train", "sft")),
    (_backend, ("train.backend", "train.zero_stage", "train.offload_optimizer")),
    (_tensor_parallel, ("train.backend", "train.tensor_parallel", "placement", "algorithm")),
    (_lora, ("model.lora", "train.backend", "train.tensor_parallel")),
)
