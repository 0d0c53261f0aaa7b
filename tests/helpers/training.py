"""Tiny model folders, trainer specs, batches and losses for tests of training backends."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.backends.base import TrainerSpec
from engine.batch import Batch, response_ids, response_positions
from engine.config import ModelConfig, OptimizerConfig, TrainConfig
from tests.helpers.tiny import VOCAB_SIZE, named_weights, tiny_folder, tiny_model

TRAIN = ("backend", "zero_stage", "gradient_checkpointing", "tensor_parallel", "offload_optimizer")


def model_folder(
    folder: Path, *, tied: bool = False, seed: int = 0, heads: dict[str, int] | None = None, **config: Any
) -> Path:
    """A complete folder of a random 2-layer Llama with dropout 0.1 in its config; `config` overrides entries of it.

    heads: other numbers and sizes of heads than the tiny model has.
    """
    tiny_folder(folder, tied=tied, **(heads or {}))
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**text, "attention_dropout": 0.1, **config}))
    weights = named_weights(tiny_model(seed, tied=tied, scale=4.0, **(heads or {})))
    if tied:
        del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def trainer_spec(source: Path, *, rank: int = 0, world_size: int = 1, head: str = "lm", **options: Any) -> TrainerSpec:
    """A spec on the CPU.

    options: of ModelConfig (dtype, init, lora), of TrainConfig (TRAIN), total_steps, seed, frozen, and of OptimizerConfig.
    """
    model = {key: options.pop(key) for key in ("dtype", "init", "lora") if key in options}
    train = {key: options.pop(key) for key in TRAIN if key in options}
    total_steps, seed, frozen = options.pop("total_steps", 5), options.pop("seed", 3), options.pop("frozen", False)
    adaptive = {"betas": (0.9, 0.95)} if options.get("optimizer", "adamw") in ("adamw", "adam") else {}
    defaults = {"lr": 1e-3, "max_grad_norm": 0.5, "weight_decay": 0.1, **adaptive}
    optimizer = OptimizerConfig(**{**defaults, **options})
    return TrainerSpec(
        head=head,
        model=ModelConfig(source=str(source), **model),
        source=source,
        train=TrainConfig(**train),
        optimizer=None if frozen else optimizer,
        total_steps=total_steps,
        seed=seed,
        rank=rank,
        world_size=world_size,
        device=torch.device("cpu"),
    )


def random_batch(size: int, seed: int = 0, prompt: int = 5, response: int = 7) -> Batch:
    """Rows of random ids and lengths; `returns` holds random targets for a value head."""
    generator = torch.Generator().manual_seed(seed)
    prompt_lengths = torch.randint(1, prompt + 1, (size,), generator=generator)
    response_lengths = torch.randint(1, response + 1, (size,), generator=generator)
    total = (prompt_lengths + response_lengths)[:, None]
    mask = torch.arange(prompt + response)[None, :] < total
    ids = torch.randint(3, VOCAB_SIZE, (size, prompt + response), generator=generator)
    response_mask = torch.arange(response)[None, :] < response_lengths[:, None]
    return Batch(
        {
            "input_ids": torch.where(mask, ids, 0),
            "attention_mask": mask,
            "prompt_lengths": prompt_lengths,
            "response_lengths": response_lengths,
            "response_mask": response_mask,
            "returns": torch.randn(size, response, generator=generator) * response_mask,
        }
    )


def tokens_of(batch: Batch) -> int:
    """Response tokens of a whole batch."""
    return int(batch.response_mask.sum())


@dataclass(frozen=True)
class Share:
    """One part's share of a loss."""

    loss: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]]


def response_logprobs(logits: Tensor, part: Batch) -> Tensor:
    """[b, R] float32 log-probabilities of the response tokens, 0 where masked."""
    rows = torch.arange(len(part), device=logits.device)[:, None]
    logprobs = torch.log_softmax(logits[rows, response_positions(part)].float(), dim=-1)
    chosen = logprobs.gather(-1, response_ids(part)[..., None]).squeeze(-1)
    return torch.where(part.response_mask, chosen, 0.0)


@dataclass(frozen=True)
class TokenLoss:
    """Mean negative log-likelihood over `tokens` response tokens, the number of the whole optimiser step."""

    tokens: int

    def __call__(self, logits: Tensor, part: Batch) -> Share:
        losses = -response_logprobs(logits, part)
        count, seen = part.response_mask.sum(), losses.detach()
        return Share(
            losses.sum() / self.tokens,
            {"policy/nll": (seen.sum() / count, count), "policy/nll_max": (seen.max(), torch.ones(()))},
        )


@dataclass(frozen=True)
class ValueLoss:
    """Mean squared error of the values at the response positions, over `tokens` of the whole optimiser step."""

    tokens: int

    def __call__(self, values: Tensor, part: Batch) -> Share:
        errors = (values.gather(1, response_positions(part)) - part.returns) ** 2 * part.response_mask
        count = part.response_mask.sum()
        return Share(errors.sum() / self.tokens, {"critic/error": (errors.detach().sum() / count, count)})


def poisoned(output: Tensor, part: Batch) -> Share:
    """A loss whose gradient is not finite."""
    return Share((output.float() * torch.inf).sum(), {})
