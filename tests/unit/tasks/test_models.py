"""Every kind of model source becomes a complete local folder, or says what was found instead."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.config import RunConfig
from engine.errors import ConfigError
from tasks.data import start_run
from tasks.models import import_model, resolve_source
from tasks.refs import opened
from tests.helpers.gguf import TEMPLATE, save_gguf
from tests.unit.tasks.finished import Finished

Configure = Callable[..., RunConfig]


def test_a_folder_is_used_as_it_is(model_folder: Path, tmp_path: Path):
    assert resolve_source(str(model_folder), str(tmp_path)) == model_folder


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("./nowhere", "no such folder"),
        ("nobody/nothing", "not in the Hub cache while HF_HUB_OFFLINE is set"),
        ("nowhere.gguf", "no such file"),
        ("runs:nothing", "no such run"),
        ("runs:", "write runs:RUN_KEY"),
        ("models:/sums", "write models:/NAME@ALIAS"),
    ],
)
def test_a_source_that_is_not_there_is_named(source: str, found: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=found):
        resolve_source(source, str(tmp_path))


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("nothing here")
    with pytest.raises(ConfigError, match=r"no config\.json \(it holds notes\.txt\)"):
        resolve_source(str(tmp_path / "empty"), str(tmp_path))


def test_a_model_without_weights_serves_only_random_starts(config: Configure, tmp_path: Path, model_folder: Path):
    bare = shutil.copytree(model_folder, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ConfigError, match=r"model\.init: random"):
        start_run(config(model={"source": str(bare)}), "pretrained")
    start_run(config(model={"source": str(bare), "init": "random"}), "random")


@pytest.mark.usefixtures("fake_session")
def test_a_run_is_a_source_by_its_last_or_a_named_iteration(config: Configure):
    run = Finished(config(), "trained")
    store = opened(run.ref).store
    assert resolve_source("runs:trained", run.ref.root) == store.folder / "iterations/00002/train/policy"
    assert resolve_source("runs:trained/1", run.ref.root) == store.folder / "iterations/00001/train/policy"
    assert resolve_source("runs:trained/0", run.ref.root) == opened(run.ref).source
    with pytest.raises(ConfigError, match="with weights: 1, 2"):
        resolve_source("runs:trained/7", run.ref.root)
    store.prune(store.committed("iterations/00002/train"))
    assert resolve_source("runs:trained", run.ref.root) == store.folder / "iterations/00001/train/policy"


@pytest.mark.usefixtures("mlflow_tables")
def test_a_model_that_is_not_registered_is_refused(tmp_path: Path):
    root = str(tmp_path / "runs")
    with pytest.raises(ConfigError, match="no alias champion"):
        resolve_source("models:/sums@champion", root)
    with pytest.raises(ConfigError, match="MLflow has no such model"):
        resolve_source("models:/sums/3", root)


def test_a_gguf_file_becomes_a_plain_folder_with_the_same_weights(tmp_path: Path):
    file = save_gguf(tmp_path / "tiny.gguf")
    folder = resolve_source(str(file), str(tmp_path / "runs"))
    assert list(folder.glob("*.safetensors"))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype="float32").state_dict()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32 and not hasattr(model.config, "quantization_config")
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], atol=0, rtol=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.decode(tokenizer("1+1=", add_special_tokens=False)["input_ids"]) == "1+1="
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2


def test_a_gguf_file_is_converted_once(tmp_path: Path):
    file = save_gguf(tmp_path / "tiny.gguf")
    first = resolve_source(str(file), str(tmp_path / "runs"))
    before = (first / "config.json").stat().st_mtime_ns
    assert resolve_source(str(file), str(tmp_path / "runs")) == first
    assert (first / "config.json").stat().st_mtime_ns == before


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ConfigError, match="cannot be converted"):
        resolve_source(str(tmp_path / "broken.gguf"), str(tmp_path / "runs"))
    assert not list((tmp_path / "runs" / ".models").iterdir())


def test_an_imported_model_is_a_folder_of_its_own(model_folder: Path, tmp_path: Path):
    folder = import_model(str(model_folder), tmp_path / "imported", str(tmp_path))
    assert {file.name for file in folder.iterdir()} == {file.name for file in model_folder.iterdir()}
    assert not any(file.is_symlink() for file in folder.iterdir())
    with pytest.raises(ConfigError, match="not empty"):
        import_model(str(model_folder), folder, str(tmp_path))
