"""Memory of roles against numbers worked out by hand, against what a real backward pass keeps, and across ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.architecture import Architecture, read_architecture
from engine.config import RunConfig
from engine.sizing import (
    BUCKET,
    GIB,
    ROOMY_STEP,
    SLICE,
    engine_memory,
    frozen_memory,
    kv_bytes,
    layer_bytes,
    micro_batch,
    roles_of,
    state_bytes,
    trained_memory,
)
from tests.contracts.sources import ROOT
from tests.helpers.configs import config

N = 6_738_415_616  # Llama-2-7B


def llama() -> Architecture:
    shapes = read_architecture(ROOT / "deployments" / "presets" / "models" / "llama-2-7b")
    assert shapes is not None
    return shapes


def run(*, dtype: str = "bfloat16", ranks: int = 8, **changed: Any) -> RunConfig:
    changed["placement"] = {"ranks": ranks, "rollout_ranks": ranks, **changed.get("placement", {})}
    changed["data"] = {"max_prompt_tokens": 512}
    changed["rollout"] = {"samples_per_prompt": 8, "max_response_tokens": 1024, **changed.get("rollout", {})}
    changed["train"] = {"prompts_per_iteration": 64, "backend": "deepspeed", **changed.get("train", {})}
    return config(model={"source": "model", "dtype": dtype}, **changed)


@pytest.mark.parametrize(
    ("dtype", "stage", "weights", "gradients", "optimiser"),
    [
        ("bfloat16", 0, 2 * N, 4 * N, 12 * N),
        ("bfloat16", 1, 2 * N, 4 * N, 12 * N // 8),
        ("bfloat16", 2, 2 * N, 4 * N // 8, 12 * N // 8),
        ("bfloat16", 3, 2 * N // 8, 4 * N // 8, 12 * N // 8),
        ("float32", 0, 4 * N, 4 * N, 8 * N),
        ("float32", 3, 4 * N // 8, 4 * N // 8, 12 * N // 8),
    ],
)
def test_a_trained_role_is_divided_as_its_stage_says(
    dtype: str, stage: int, weights: int, gradients: int, optimiser: int
):
    memory = trained_memory(run(dtype=dtype, train={"zero_stage": stage}), llama(), "lm")
    assert (memory.weights, memory.gradients, memory.optimiser) == (weights, gradients, optimiser)


def test_a_critic_has_no_output_layer_and_one_more_vector():
    assert trained_memory(run(), llama(), "value").parameters == N - 32_000 * 4096 + 4096 + 1


@given(st.integers(1, 64), st.sampled_from([1, 2, 3]))
def test_all_ranks_together_hold_every_number_once(ranks: int, stage: int):
    memory = trained_memory(run(ranks=ranks, train={"zero_stage": stage}), llama(), "lm")
    assert 0 <= ranks * memory.optimiser - 12 * N < ranks
    whole = [memory.gradients == 4 * N, memory.weights == 2 * N]
    assert ranks == 1 or whole == [stage < 2, stage < 3]


def test_a_frozen_role_has_weights_alone():
    memory = frozen_memory(run(), llama())
    assert (memory.weights, memory.gradients, memory.optimiser, memory.buffers) == (2 * N, 0, 0, 0)
    assert frozen_memory(run(train={"zero_stage": 3}), llama()).weights == 2 * N // 8


def test_activations_of_a_checkpointed_pass_worked_out_by_hand():
    memory = trained_memory(run(train={"zero_stage": 3, "gradient_checkpointing": True}), llama(), "lm")
    tokens, hidden, mlp = 8192, 4096, 11008
    kept = 32 * 2 * hidden * tokens
    layer = 2 * (4 * hidden + 4 + 4 * hidden) + 8 * hidden + 4 * 32 + 8 * mlp + 2 * 1536
    again = (layer + 2 * 2 * (hidden + mlp)) * tokens
    head = 3 * 2 * 32_000 * tokens + 3 * 4 * 2**25
    assert head < again  # so the layer that is computed again decides
    assert memory.activations == kept + again


@pytest.mark.parametrize(
    ("tokens", "ranks", "expected"),
    [(8192, 8, 8192), (100, 8, 1536), (10**9, 8, 64 * 1536)],
    ids=["as configured", "one sample at least", "all samples of a rank at most"],
)
def test_tokens_of_a_micro_batch(tokens: int, ranks: int, expected: int):
    assert micro_batch(run(ranks=ranks, train={"micro_batch_tokens": tokens})) == expected


def test_an_engine_on_a_gpu_fills_its_share_of_it():
    memory = engine_memory(run(rollout={"gpu_memory_utilization": 0.5}), llama(), 80 * GIB)
    assert memory.total == 40 * GIB and memory.weights == 2 * N
    halves = engine_memory(run(rollout={"gpu_memory_utilization": 0.5, "tensor_parallel": 2}), llama(), 80 * GIB)
    assert halves.total == 40 * GIB and halves.weights == N and halves.kv_cache > memory.kv_cache


def test_an_engine_on_a_cpu_has_the_cache_that_was_asked_for():
    assert engine_memory(run(rollout={"kv_cache_gib": 3}), llama(), None).kv_cache == 3 * GIB


def test_transformers_keeps_the_whole_batch():
    memory = engine_memory(run(rollout={"backend": "hf"}), llama(), 80 * GIB)
    assert memory.kv_cache == 64 * 1536 * 2 * 2 * 32 * 4096


def test_keys_and_values_of_a_token():
    assert kv_bytes(run(), llama()) == 2 * 2 * 32 * 32 * 128
    assert kv_bytes(run(rollout={"tensor_parallel": 4}), llama()) == 2 * 2 * 32 * 8 * 128


def test_a_checkpoint_holds_weights_moments_and_master():
    assert state_bytes(run(), llama(), "policy") == 14 * N
    assert state_bytes(run(dtype="float32"), llama(), "policy") == 12 * N


def test_roles_follow_from_the_algorithm():
    assert roles_of(run()) == ["policy", "rollout"]
    assert roles_of(run(algorithm={"name": "ppo", "kl_coef": 0.1})) == ["policy", "critic", "reference", "rollout"]


def test_sizes_of_buffers_are_those_of_the_code_that_takes_them():
    from engine.algorithms import logprobs
    from engine.backends import deepspeed_train

    assert (BUCKET, SLICE) == (deepspeed_train.BUCKET, logprobs.SLICE_ELEMENTS)
    source = (ROOT / "engine" / "backends" / "vllm_rollout.py").read_text()
    assert f"ROOMY_STEP = {ROOMY_STEP}" in source


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_a_layer_keeps_what_a_real_backward_pass_keeps(model_type: str, dtype: str, tmp_path: Path):
    rows, length = 2, 128
    kept = [_kept_bytes(tmp_path / str(layers), model_type, layers, dtype, rows, length) for layers in (1, 3)]
    shapes = read_architecture(tmp_path / "1")
    assert shapes is not None
    configured = config(
        model={"source": "model", "dtype": dtype}, data={"max_prompt_tokens": 28}, rollout={"max_response_tokens": 100}
    )
    per_token = (kept[1] - kept[0]) / 2 / (rows * length)
    assert layer_bytes(configured, shapes) == pytest.approx(per_token, rel=0.01)


def _kept_bytes(folder: Path, model_type: str, layers: int, dtype: str, rows: int, length: int) -> int:
    """Bytes that autograd keeps in a forward pass of a random model, parameters left out, memory seen twice counted once."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {"hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 8, "num_key_value_heads": 2}
    made = AutoConfig.for_model(
        model_type, vocab_size=64, head_dim=16, num_hidden_layers=layers, max_position_embeddings=256, **options
    )
    made.save_pretrained(folder)
    model = AutoModelForCausalLM.from_config(made).to(torch.bfloat16 if dtype == "bfloat16" else torch.float32).train()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    mask = torch.ones(rows, length, dtype=torch.bool)
    mask[0, length // 2 :] = False
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=torch.zeros(rows, length, dtype=torch.int64), attention_mask=mask, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
