"""Starting a run: what is refused before anything exists, what is committed, what is made again."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import RunConfig
from engine.data.promptfile import load_prompts
from engine.errors import ConfigError, DataError
from engine.runs import read_record
from tasks.data import prepare_data, start_run
from tasks.refs import opened

Configure = Callable[..., RunConfig]


def test_a_started_run_has_its_data_and_one_attempt(config: Configure):
    ref = start_run(config(), "started")
    run = opened(ref)
    folder = run.store.read(run.store.committed("data"))
    assert len(load_prompts(folder / "train.parquet")) == 32 and len(load_prompts(folder / "eval.parquet")) == 8
    assert json.loads((folder / "data_card.json").read_text())["files"][0]["rows"] == 40
    record = read_record(run.store.folder)
    assert {"data/train", "data/eval", "tokenizer", "model"} <= record["fingerprints"].keys()
    assert [attempt["status"] for attempt in record["attempts"]] == ["running"]
    assert run.store.lease.held


def test_a_batch_larger_than_the_data_is_refused_with_both_numbers(config: Configure):
    options = config(train={"prompts_per_iteration": 64})
    with pytest.raises(ConfigError, match=r"prompts_per_iteration = 64: .*32 rows"):
        start_run(options, "large")
    assert not (Path(options.root) / "large").exists()


def test_a_run_that_the_disk_cannot_hold_is_refused_with_both_sizes(config: Configure):
    options = config(iterations=10**12)
    with pytest.raises(ConfigError, match=r"the run needs up to .* GiB .* GiB are free"):
        start_run(options, "endless")
    assert not (Path(options.root) / "endless").exists()


def test_everything_wrong_with_data_and_tokenizer_is_in_one_message(config: Configure, tmp_path: Path):
    from tests.helpers.models import save_model

    (tmp_path / "chats.jsonl").write_text(
        "".join(json.dumps({"prompt": [{"role": "user", "content": f"{n}?"}], "answer": "1"}) + "\n" for n in range(40))
    )
    (tmp_path / "sft.jsonl").write_text('{"prompt": "2+2="}\n')
    options = config(
        model={"source": str(save_model(tmp_path / "bare", template=None))},
        data={"train": [{"path": str(tmp_path / "chats.jsonl")}]},
        train={"prompts_per_iteration": 64},
        sft={"data": [{"path": str(tmp_path / "sft.jsonl")}], "steps": 1},
    )
    with pytest.raises(ConfigError) as caught:
        start_run(options, "several")
    keys = {problem.key for problem in caught.value.problems}
    assert "train.prompts_per_iteration" in keys and any("chat_template" in str(p) for p in caught.value.problems)
    assert any(key.startswith("sft.data") for key in keys)


def test_nothing_is_written_for_data_that_cannot_be_used(config: Configure, tmp_path: Path):
    options = config()
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1="}\n')
    with pytest.raises(ConfigError, match="answer"):
        start_run(options, "bad")
    assert not Path(options.root).exists()


def test_suites_with_data_of_their_own_are_committed(config: Configure, tmp_path: Path):
    (tmp_path / "hard.jsonl").write_text('{"prompt": "77+1=", "answer": "78"}\n')
    suites = {"suites": [{"name": "hard", "data": [{"path": str(tmp_path / "hard.jsonl")}]}]}
    run = opened(start_run(config(evaluation=suites, gate={"suite": "hard"}), "suites"))
    (prompt,) = load_prompts(run.store.read(run.store.committed("data")) / "suite-hard.parquet")
    assert prompt.answer == "78"


def test_supervised_examples_are_committed_and_part_of_the_digest(config: Configure, tmp_path: Path):
    (tmp_path / "sft.jsonl").write_text('{"prompt": "2+2=", "completion": "4"}\n')
    sft = {"data": [{"path": str(tmp_path / "sft.jsonl")}], "steps": 1}
    run = opened(start_run(config(sft=sft), "sft"))
    assert (run.store.folder / "data" / "sft.parquet").is_file()
    assert "data/sft" in read_record(run.store.folder)["fingerprints"]


def test_lost_data_is_made_again(config: Configure):
    ref = start_run(config(), "lost")
    run = opened(ref)
    before = (run.store.folder / "data" / "train.parquet").read_bytes()
    shutil.rmtree(run.store.folder / "data")
    prepare_data.fn(ref)
    assert (run.store.folder / "data" / "train.parquet").read_bytes() == before


def test_lost_data_whose_sources_changed_is_refused(config: Configure, tmp_path: Path):
    ref = start_run(config(), "moved")
    shutil.rmtree(opened(ref).store.folder / "data")
    file = tmp_path / "sums.jsonl"
    file.write_text(file.read_text().replace('"answer": "4"', '"answer": "5"', 1))
    with pytest.raises(DataError, match="changed since"):
        prepare_data.fn(ref)


def test_a_configured_chat_template_becomes_part_of_the_base_model(config: Configure, tmp_path: Path):
    from transformers import AutoTokenizer

    from tests.helpers.models import save_model

    bare = save_model(tmp_path / "bare", template=None)
    template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    run = opened(start_run(config(model={"source": str(bare), "chat_template": template}), "template"))
    assert AutoTokenizer.from_pretrained(run.source).chat_template == template
    assert (run.source / "model.safetensors").read_bytes() == (bare / "model.safetensors").read_bytes()
    assert AutoTokenizer.from_pretrained(bare).chat_template is None
