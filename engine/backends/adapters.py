"""Low-rank adapters of the policy (Hu et al. 2021) through peft: put in, told apart by name, merged into the weights."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.config import LoraConfig
from engine.errors import ConfigError, Problem

DOWN, UP = ".lora_A.weight", ".lora_B.weight"  # [rank, in] and [out, rank]
BASE = "base"  # kind of optimiser state: the frozen weight under an adapter


@dataclass(frozen=True)
class Adapter:
    """Names of the two factors of one adapted weight."""

    down: str
    up: str


def add_adapters(causal: Any, lora: LoraConfig, seed: int) -> None:
    """Freeze a language model and give every target module an adapter, which starts as no change at all.

    The random factor depends on the seed alone. Raises ConfigError if a target is no linear layer of the model.
    """
    problems = _problems(causal, lora)
    if problems:
        raise ConfigError("The policy cannot be given these adapters.", problems=problems)
    import peft

    options = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets), lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        peft.inject_adapter_in_model(options, causal)
    for name, parameter in causal.named_parameters():
        parameter.requires_grad_("lora_" in name)


def public_name(key: str) -> str:
    """Hugging Face name of a tensor that peft has wrapped; the factors of an adapter end in DOWN and UP."""
    return key.replace(".base_layer.", ".").replace(".default.", ".")


def is_factor(name: str) -> bool:
    """Whether a tensor belongs to an adapter."""
    return name.endswith((DOWN, UP))


def adapters(names: Iterable[str]) -> dict[str, Adapter]:
    """Name of every adapted weight -> its adapter."""
    stems = [name.removesuffix(DOWN) for name in names if name.endswith(DOWN)]
    return {f"{stem}.weight": Adapter(f"{stem}{DOWN}", f"{stem}{UP}") for stem in stems}


def merged(base: Tensor, down: Tensor, up: Tensor, lora: LoraConfig) -> Tensor:
    """base + alpha / rank * up @ down, computed and returned in float32."""
    return base.float() + (lora.alpha / lora.rank) * (up.float() @ down.float())


def _problems(causal: Any, lora: LoraConfig) -> list[Problem]:
    linear = {name.rsplit(".", 1)[-1] for name, part in causal.named_modules() if isinstance(part, nn.Linear)}
    names = ", ".join(sorted(linear))
    return [
        Problem(f"model.lora.targets[{index}]", target, f"no linear layer has this name; the model has {names}")
        for index, target in enumerate(lora.targets)
        if target not in linear
    ]
