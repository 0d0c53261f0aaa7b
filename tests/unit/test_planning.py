"""The dry run as a command sees it: sizes on this machine and for another one, refusals of both in one message."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from engine.architecture import linear_layers
from engine.commands.planning import dry_run
from engine.errors import ConfigError
from tests.contracts.sources import ROOT
from tests.helpers.configs import write_config

SMOKE = str(ROOT / "deployments" / "presets" / "smoke.yaml")
MODELS = ROOT / "deployments" / "presets" / "models"
A_GPU = "placement.device_memory_gib=80"


@pytest.fixture(autouse=True)
def environment_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", os.environ.get("HF_HUB_OFFLINE", "1"))
    monkeypatch.chdir(tmp_path)
    yield


def refusals(*overrides: str, config: str = SMOKE, architecture: Path | None = None) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        dry_run(config, list(overrides), None if architecture is None else str(architecture))
    return {problem.key: problem.remedy for problem in caught.value.problems}


def test_sizes_of_a_run_on_this_machine(tmp_path: Path):
    found = dry_run(SMOKE, [], None)
    sizes = found.content["sizes"]
    assert sizes["architecture"]["parameters"] == 43_200
    assert sizes["machine"]["ram_bytes"] in (psutil.virtual_memory().total, None)  # None where there is a GPU
    assert sizes["machine"]["disk_bytes"] > 0
    assert found.content["prompt_tokens"]["max"] > 0
    assert "pool shared" in found.text and not list(tmp_path.iterdir())


def test_memory_and_disk_that_are_not_there_are_refused_together():
    found = refusals("rollout.kv_cache_gib=100000", "iterations=1000000000")
    assert {"model.source", "root"} <= found.keys()
    assert "100000" in found["model.source"] and "free" in found["root"]


def test_another_machine_needs_the_size_of_its_devices():
    assert refusals(architecture=MODELS / "smoke").keys() == {"placement.device_memory_gib"}


def test_another_machine_may_have_more_of_everything_than_this_one():
    found = dry_run(
        SMOKE, [A_GPU, "placement.ranks=16", "train.mini_batches=1", "iterations=1000000000"], str(MODELS / "smoke")
    )
    sizes = found.content["sizes"]
    assert sizes["pools"]["shared"]["devices"] == 16 and sizes["machine"]["disk_bytes"] is None
    assert found.content["prompt_tokens"]["max"] > 0  # this folder holds a tokenizer


def test_prompts_are_not_measured_without_a_tokenizer():
    found = dry_run(SMOKE, ["placement.device_memory_gib=400"], str(MODELS / "llama-2-7b"))
    assert set(found.content["prompt_tokens"].values()) == {None}
    assert found.content["sizes"]["architecture"]["parameters"] == 6_738_415_616


def test_positions_of_the_other_model_count():
    found = refusals(A_GPU, "data.max_prompt_tokens=5000", architecture=MODELS / "llama-2-7b")
    assert "4096 positions" in found["data.max_prompt_tokens"]


def test_a_folder_without_a_config_is_refused(tmp_path: Path):
    assert "config.json" in refusals(A_GPU, architecture=tmp_path)["model.source"]


def test_a_type_of_model_that_is_not_known_is_planned_without_sizes(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    found = dry_run(SMOKE, [A_GPU], str(tmp_path))
    assert found.content["sizes"] is None and "not known" in found.text


def test_faulty_options_data_and_sizes_are_one_message(tmp_path: Path):
    config = write_config(tmp_path, data={"eval": [{"path": "missing.jsonl"}]}, foo=1)
    found = refusals("placement.device_memory_gib=1", config=str(config), architecture=MODELS / "llama-2-7b")
    assert {"foo", "placement.device_memory_gib"} <= found.keys()
    assert any(key.startswith("data.eval") for key in found)


LORA = ["train.backend=torch", "train.zero_stage=0"]


def test_adapters_that_no_layer_can_take_are_refused_by_name():
    found = refusals(*LORA, "model.lora={targets: [q_proj, query, lm_head], rank: 4096}")
    assert found.keys() == {"model.lora.targets[1]", "model.lora.rank"}
    assert "it has down_proj, gate_proj, k_proj" in found["model.lora.targets[1]"]
    assert "k_proj" not in found["model.lora.rank"] and "use " in found["model.lora.rank"]


def test_the_layers_of_another_type_are_those_in_its_weights(tmp_path: Path):
    """No formula for this type: names and sides come from the header of the file."""
    folder = tmp_path / "model"
    shutil.copytree(MODELS / "smoke", folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "model_type": "phi3"}))
    tensors = {"model.layers.0.qkv_proj.weight": torch.zeros(96, 32), "model.embed_tokens.weight": torch.zeros(50, 32)}
    save_file(tensors, folder / "model.safetensors")
    assert linear_layers(folder) == {"qkv_proj": 32}
    (folder / "model.safetensors").unlink()
    assert linear_layers(folder) is None


def test_the_sides_of_layers_are_those_of_the_modules(tmp_path: Path):
    config = AutoConfig.from_pretrained(MODELS / "smoke")
    with torch.device("meta"):
        modules = dict(AutoModelForCausalLM.from_config(config).named_modules())
    sides = {
        name.rsplit(".", 1)[-1]: min(part.weight.shape)
        for name, part in modules.items()
        if isinstance(part, torch.nn.Linear)
    }
    assert linear_layers(MODELS / "smoke") == sides
