"""What every rollout engine needs from a model folder and checks about a request, whatever library generates."""

import math
from collections.abc import Sequence
from pathlib import Path

from engine.backends.base import Completion, RolloutSpec
from engine.backends.imports import without
from engine.backends.modelling import load_config
from engine.errors import ConfigError, DivergedError, Problem, ShapeError, TransientError

with without("sklearn", "scipy"):
    from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig


SEEDS = 2**63


def end_token_ids(source: Path) -> tuple[int, ...]:
    """Ids that end a response, sorted: those of the generation config (else the model config) and the tokenizer's own.

    Supervised rows end with the tokenizer's token, published chat models often end turns with another one.
    Raises ConfigError if the folder names none: such a model could never stop.
    """
    if (source / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(source)
    else:
        generation = GenerationConfig.from_model_config(load_config(source))
    configured = generation.eos_token_id
    ids = set(configured if isinstance(configured, list) else [configured])
    ids.add(AutoTokenizer.from_pretrained(source).eos_token_id)
    ids.discard(None)
    if not ids:
        remedy = "set eos_token_id in generation_config.json or eos_token in tokenizer_config.json"
        raise ConfigError("The model has no end token.", problems=[Problem("model.source", str(source), remedy)])
    return tuple(sorted(ids))


def check_lengths(spec: RolloutSpec, config: PreTrainedConfig) -> None:
    """Raises ConfigError if prompt and response together are longer than the model's positions."""
    positions = config.to_dict().get("max_position_embeddings")
    wanted = spec.max_prompt_tokens + spec.max_response_tokens
    if positions is not None and wanted > positions:
        remedy = f"with rollout.max_response_tokens = {spec.max_response_tokens} it exceeds {positions} positions"
        problem = Problem("data.max_prompt_tokens", spec.max_prompt_tokens, remedy)
        raise ConfigError(f"A sample of {wanted} tokens does not fit the model.", problems=[problem])


def check_request(
    spec: RolloutSpec, vocab_size: int, prompts: Sequence[Sequence[int]], seeds: Sequence[int], max_tokens: int
) -> None:
    """Refuse what an engine would cut or misread: ShapeError names the first prompt or seed that does not fit."""
    if len(prompts) != len(seeds):
        raise ShapeError(f"{len(prompts)} prompts came with {len(seeds)} seeds.")
    if bad := [seed for seed in seeds if not 0 <= seed < SEEDS]:
        raise ShapeError(f"seed {bad[0]} is not in [0, 2**63): engines take some others for no seed.")
    if not 1 <= max_tokens <= spec.max_response_tokens:
        raise ShapeError(f"max_tokens is {max_tokens}; the engine was built for 1 to {spec.max_response_tokens}.")
    for number, prompt in enumerate(prompts):
        if not 1 <= len(prompt) <= spec.max_prompt_tokens:
            raise ShapeError(
                f"prompt {number} has {len(prompt)} tokens; the engine was built for 1 to {spec.max_prompt_tokens}."
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise ShapeError(f"prompt {number} holds ids {min(prompt)} to {max(prompt)}; there are {vocab_size} ids.")


def check_served(version: int | None) -> int:
    """The version being served; raises TransientError where no weights were loaded, as after a restart."""
    if version is None:
        raise TransientError("the engine holds no weights.", remedy="Load weights first; a restarted engine is blank.")
    return version


def completion(token_ids: Sequence[int], logprobs: Sequence[float], finish_reason: int, version: int) -> Completion:
    """One response as the engine reported it.

    Raises ShapeError unless every token has its log-probability, DivergedError unless all are finite.
    """
    if len(token_ids) != len(logprobs):
        raise ShapeError(f"the engine sampled {len(token_ids)} tokens and reported {len(logprobs)} log-probabilities.")
    if not all(map(math.isfinite, logprobs)):
        raise DivergedError("the engine reported log-probabilities that are not finite.", version=version)
    return Completion(tuple(token_ids), tuple(logprobs), finish_reason)
