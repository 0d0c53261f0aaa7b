"""Parameter counts from config.json alone: equal to those of the modules that transformers builds, and to published ones."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from engine.architecture import FAMILIES, read_architecture
from engine.errors import ConfigError
from tests.contracts.sources import ROOT

MODELS = ROOT / "deployments" / "presets" / "models"
TINY: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 70,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def folder_of(folder: Path, **content: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY, **content}))
    return folder


@pytest.mark.parametrize(
    "options",
    [{}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}],
    ids=["plain", "bias", "tied"],
)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_counts_are_those_of_the_built_modules(model_type: str, options: dict[str, Any], tmp_path: Path):
    from engine.backends.modelling import expected_shapes

    folder = folder_of(tmp_path, model_type=model_type, **options)
    shapes = read_architecture(folder)
    assert shapes is not None
    for head, count in (("lm", shapes.parameters), ("value", shapes.value_parameters)):
        assert count == sum(prod(shape) for shape in expected_shapes(folder, head).values())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("qwen2.5-1.5b", 1_543_714_304), ("llama-2-7b", 6_738_415_616), ("llama-2-13b", 13_015_864_320)],
)
def test_the_models_of_the_presets_have_their_published_sizes(name: str, parameters: int):
    shapes = read_architecture(MODELS / name)
    assert shapes is not None and shapes.parameters == parameters


@pytest.mark.parametrize(
    "content",
    [{"model_type": "mamba"}, {"model_type": "qwen3", "head_dim": None}, {"model_type": "llama", "vocab_size": None}],
)
def test_what_is_not_known_is_none(content: dict[str, Any], tmp_path: Path):
    assert read_architecture(folder_of(tmp_path, **content)) is None


def test_heads_that_llama_leaves_out_follow_from_the_others(tmp_path: Path):
    shapes = read_architecture(folder_of(tmp_path, model_type="llama", num_key_value_heads=None, head_dim=None))
    assert shapes is not None and (shapes.kv_heads, shapes.head_dim) == (6, 8)


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_folder_without_a_readable_config_is_refused(text: str | None, tmp_path: Path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_architecture(tmp_path)
    (problem,) = caught.value.problems
    assert problem.key == "model.source" and "config.json" in problem.remedy
