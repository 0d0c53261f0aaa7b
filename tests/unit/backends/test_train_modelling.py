"""The module a trainer gets: nothing random that should not be, nothing left out of what should be loaded."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig

from engine.backends.modelling import ValueModel, build_module, named_weights
from engine.backends.trainers import build_trainer
from engine.backends.weights import load_folder, save_folder, weights_sha256
from engine.errors import ConfigError, StoreError
from tests.helpers.tiny import tiny_folder
from tests.helpers.training import (
    TokenLoss,
    ValueLoss,
    model_folder,
    random_batch,
    response_logprobs,
    tokens_of,
    trainer_spec,
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "source")


def without_tensor(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_random_weights_follow_the_seed_alone_and_disturb_no_other_randomness(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source")
    digests = []
    for seed, noise in ((3, 1), (3, 2), (4, 1)):
        torch.manual_seed(noise)
        state = torch.get_rng_state()
        module = build_module(trainer_spec(source, init="random", seed=seed))
        assert torch.equal(torch.get_rng_state(), state)
        digests.append(weights_sha256(named_weights(module)))
    assert digests[0] == digests[1] != digests[2]


def test_random_weights_in_bfloat16_are_those_of_float32_rounded(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source")
    full = named_weights(build_module(trainer_spec(source, init="random")))
    half = named_weights(build_module(trainer_spec(source, init="random", dtype="bfloat16")))
    assert all(torch.equal(half[name], full[name].bfloat16()) for name in full)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_missing_tensor_is_refused_by_name(name: str, source: Path) -> None:
    without_tensor(source, name)
    with pytest.raises(StoreError, match=name):
        build_module(trainer_spec(source))


def test_a_folder_without_weights_or_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="empty"):
        build_module(trainer_spec(tiny_folder(tmp_path / "empty")))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(StoreError, match="nothing"):
        build_module(trainer_spec(tmp_path / "nothing"))


def test_weights_cut_off_or_of_another_width_are_refused(source: Path) -> None:
    path = source / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StoreError, match="cannot be loaded"):
        build_module(trainer_spec(source))
    path.write_bytes(whole)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    with pytest.raises(StoreError, match="cannot be loaded"):
        build_module(trainer_spec(source))


def test_architectures_that_cannot_be_trained_here_are_refused(tmp_path: Path, source: Path) -> None:
    experts = MixtralConfig(
        vocab_size=100, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    experts.save_pretrained(tmp_path / "experts")
    with pytest.raises(ConfigError, match="another form"):
        build_module(trainer_spec(tmp_path / "experts", init="random"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ConfigError, match="quantised"):
        build_module(trainer_spec(source))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_of_the_config_never_acts(checkpointing: bool, source: Path) -> None:
    """Scored twice, whole and in single rows, and inside the step that would train: the ratio is 1 everywhere."""
    trainer = build_trainer(trainer_spec(source, backend="torch", gradient_checkpointing=checkpointing))
    batch, seen = random_batch(6), []
    whole = trainer.score([batch], response_logprobs)[0]
    single = torch.cat(trainer.score(batch.split([1] * 6), response_logprobs))
    loss = TokenLoss(tokens_of(batch))

    def watching(logits: torch.Tensor, part: object) -> object:
        seen.append(response_logprobs(logits, batch).detach())
        return loss(logits, batch)

    trainer.step([batch], watching)  # type: ignore[arg-type]
    for other in (single, seen[0]):
        assert float((other - whole).abs().max()) <= 1e-5


def test_gradient_checkpointing_changes_nothing(source: Path) -> None:
    batch = random_batch(6)
    results = []
    for checkpointing in (False, True):
        trainer = build_trainer(trainer_spec(source, backend="torch", gradient_checkpointing=checkpointing))
        trainer.step([batch], TokenLoss(tokens_of(batch)))
        results.append(trainer.optimizer_state())
    assert all(torch.allclose(results[0][name], results[1][name], atol=1e-7) for name in results[0])


def test_rotary_frequencies_stay_in_float32(source: Path) -> None:
    module = build_module(trainer_spec(source, dtype="bfloat16"))
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in module.buffers()} == {torch.float32}


def test_values_are_float32_also_in_bfloat16(source: Path) -> None:
    """The head computes in float32: its result has more digits than bfloat16 can hold."""
    module = build_module(trainer_spec(source, head="value", dtype="bfloat16"))
    assert isinstance(module, ValueModel)
    torch.nn.init.normal_(module.value_head.weight, generator=torch.Generator().manual_seed(0))
    batch = random_batch(4)
    with torch.no_grad():
        values = module(batch.input_ids, batch.attention_mask)
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())


def test_a_critic_starts_from_a_policy_at_zero_and_loads_from_its_own_folder(source: Path, tmp_path: Path) -> None:
    batch = random_batch(5)
    critic = build_trainer(trainer_spec(source, head="value", backend="torch"))
    values = critic.score([batch], lambda output, part: output)[0]
    assert values.shape == batch.input_ids.shape and values.dtype == torch.float32
    assert float(values.abs().max()) == 0.0
    critic.step([batch], ValueLoss(tokens_of(batch)))
    critic.step([batch], ValueLoss(tokens_of(batch)))
    assert "lm_head.weight" not in critic.weights() and "value_head.bias" in critic.weights()

    save_folder(critic.weights(), source, tmp_path / "critic", head="value")
    again = build_trainer(trainer_spec(tmp_path / "critic", head="value", backend="torch"))
    assert weights_sha256(again.weights()) == weights_sha256(critic.weights())
    with pytest.raises(StoreError, match=r"lm_head\.weight"):
        build_module(trainer_spec(tmp_path / "critic"))


def test_a_critic_with_half_a_head_is_refused(source: Path, tmp_path: Path) -> None:
    critic = build_trainer(trainer_spec(source, head="value", backend="torch"))
    save_folder(critic.weights(), source, tmp_path / "critic", head="value")
    without_tensor(tmp_path / "critic", "value_head.bias")
    with pytest.raises(StoreError, match=r"value_head\.bias"):
        build_module(trainer_spec(tmp_path / "critic", head="value"))


def test_values_do_not_depend_on_padding(source: Path) -> None:
    """The value of a position reads that position, alone or beside longer rows."""
    module = build_module(trainer_spec(source, head="value"))
    assert isinstance(module, ValueModel)
    torch.nn.init.normal_(module.value_head.weight, generator=torch.Generator().manual_seed(0))
    batch = random_batch(4)
    with torch.no_grad():
        together = module(batch.input_ids, batch.attention_mask)
        for row in range(4):
            alone = batch.index(torch.tensor([row])).trim()
            width = alone.input_ids.shape[1]
            torch.testing.assert_close(module(alone.input_ids, alone.attention_mask)[0], together[row, :width])


def test_names_are_those_of_the_source_folder(source: Path) -> None:
    assert named_weights(build_module(trainer_spec(source))).keys() == load_folder(source).keys()
