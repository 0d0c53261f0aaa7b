"""Model folders: what is read is whole, what is written loads again, and the digest knows only names and values."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.backends.trainers import build_trainer
from engine.backends.weights import is_finite, load_folder, save_folder, weights_sha256
from engine.errors import DivergedError, StoreError
from tests.helpers.training import model_folder, random_batch, trainer_spec


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = model_folder(tmp_path / "source")
    (folder / "chat_template.jinja").write_text("<u>{{ messages[0].content }}</u>")
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    return folder


def shard(folder: Path, target: Path) -> None:
    """The same weights in two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    target.mkdir()
    names = sorted(tensors)
    files = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    for file, members in files.items():
        save_file({name: tensors[name] for name in members}, target / file)
    weight_map = {name: file for file, members in files.items() for name in members}
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_sharded_folder_reads_and_digests_like_one_file(source: Path, tmp_path: Path) -> None:
    shard(source, tmp_path / "sharded")
    whole, sharded = load_folder(source), load_folder(tmp_path / "sharded")
    assert whole.keys() == sharded.keys()
    assert weights_sha256(whole) == weights_sha256(sharded)


def test_a_promised_tensor_that_no_file_holds_is_named(source: Path, tmp_path: Path) -> None:
    shard(source, tmp_path / "sharded")
    index = tmp_path / "sharded" / "model.safetensors.index.json"
    promises = json.loads(index.read_text())
    promises["weight_map"]["model.ghost.weight"] = "a.safetensors"
    index.write_text(json.dumps(promises))
    with pytest.raises(StoreError, match=r"model\.ghost\.weight"):
        load_folder(tmp_path / "sharded")


def test_a_file_cut_in_half_is_refused_with_its_path(source: Path) -> None:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(StoreError, match=r"source/model\.safetensors"):
        load_folder(source)


def test_the_digest_changes_with_one_bit_a_name_a_type_or_a_shape() -> None:
    base = {"a": torch.zeros(2, 3), "b": torch.ones(4)}
    flipped = base["a"].clone()
    flipped.view(torch.int32)[1, 2] = 1
    others: list[dict[str, Tensor]] = [
        {**base, "a": flipped},
        {"a": base["a"], "c": base["b"]},
        {**base, "b": torch.ones(4, dtype=torch.bfloat16)},
        {**base, "a": torch.zeros(3, 2)},
    ]
    digests = {weights_sha256(tensors) for tensors in [base, *others]}
    assert len(digests) == 5
    assert weights_sha256(dict(reversed(base.items()))) == weights_sha256(base)
    assert weights_sha256({**base, "a": torch.zeros(3, 2).T}) == weights_sha256(base)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_saved_folder_loads_anywhere_with_the_same_logits(tied: bool, tmp_path: Path) -> None:
    """Nothing is newly initialised; a tied head and its embedding share memory and are written once."""
    source = model_folder(tmp_path / "source", tied=tied)
    trainer = build_trainer(trainer_spec(source, backend="torch"))
    save_folder(trainer.weights(), source, tmp_path / "saved")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    shared = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert shared == tied
    assert ("lm_head.weight" in load_folder(tmp_path / "saved")) != tied
    batch = random_batch(4)
    in_memory = trainer.score([batch], lambda logits, part: logits)[0]
    loaded = model.eval()(batch.input_ids, attention_mask=batch.attention_mask).logits.detach()
    assert float((in_memory - loaded).abs().max()) <= 1e-6


def test_a_saved_folder_is_complete_and_says_its_type(source: Path, tmp_path: Path) -> None:
    weights = {name: tensor.bfloat16() for name, tensor in load_folder(source).items()}
    save_folder(weights, source, tmp_path / "saved")
    saved = {path.name for path in (tmp_path / "saved").iterdir()}
    assert saved == {path.name for path in source.iterdir()}
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["attention_dropout"] == 0.1  # a later user's own affair
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<u>hi</u>"


@pytest.mark.parametrize(
    ("change", "error", "names"),
    [
        ({"model.norm.weight": torch.empty(0)}, StoreError, r"model\.norm\.weight is \[0\] instead of \[64\]"),
        ({"model.norm.weight": None}, StoreError, r"missing model\.norm\.weight"),
        ({"model.ghost.weight": torch.ones(1)}, StoreError, r"unknown model\.ghost\.weight"),
        ({"model.norm.weight": torch.full((64,), torch.nan)}, DivergedError, r"model\.norm\.weight"),
    ],
    ids=["empty", "missing", "unknown", "not finite"],
)
def test_a_bad_tensor_stops_the_save_with_its_name(
    change: dict[str, Tensor | None], error: type[Exception], names: str, source: Path, tmp_path: Path
) -> None:
    weights = {name: t for name, t in {**load_folder(source), **change}.items() if t is not None}
    with pytest.raises(error, match=names):
        save_folder(weights, source, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(value: float, dtype: torch.dtype) -> None:
    for place in (0, 500, 999):
        tensor = torch.linspace(-3, 3, 1000).to(dtype)
        assert is_finite(tensor)
        tensor[place] = value
        assert not is_finite(tensor)
    assert is_finite(torch.empty(0, dtype=dtype))
