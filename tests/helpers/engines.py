"""Rollout engines for tests: one vLLM engine for the whole test process, because it takes seconds to start."""

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.backends.base import Completion, RolloutSpec
from engine.backends.engines import build_engine
from tests.helpers.tiny import tiny_folder


def rollout_spec(source: Path, **options: Any) -> RolloutSpec:
    """A spec for prompts of at most 200 and responses of at most 32 tokens; `options` replace its other values."""
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "max_prompt_tokens": 200,
        "max_response_tokens": 32,
        "top_p": 1.0,
        "top_k": 0,
        "stop": (),
        "kv_cache_gib": 1,
        "gpu_memory_utilization": 0.3,
        "max_batched_tokens": None,
        "tensor_parallel": 1,
        "shares_gpu": False,
        "max_batch": 128,
    }
    return RolloutSpec(source=source, **{**defaults, **options})


@cache
def shared_vllm() -> Any:
    """The vLLM engine on the tiny model that tests of one process share; load weights before use, never close it."""
    return build_engine(rollout_spec(tiny_folder(Path(tempfile.mkdtemp()))), "vllm")


def logprobs_of(model: Any, prompt: list[int], response: tuple[int, ...], temperature: float = 1.0) -> Tensor:
    """[R] float32: log-probabilities of a response after a prompt, from one forward pass of the model over both."""
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]


def assert_ends_are_told(responses: Sequence[Completion], end: int, limit: int) -> None:
    """Some responses end with an end token, which belongs to them, the others at the limit; each says which."""
    for one in responses:
        assert len(one.token_ids) == len(one.logprobs)
        assert end not in one.token_ids[:-1]
        assert one.finish_reason == (0 if one.token_ids[-1] == end else 1)
        assert one.finish_reason == 0 or len(one.token_ids) == limit
    assert {one.finish_reason for one in responses} == {0, 1}
