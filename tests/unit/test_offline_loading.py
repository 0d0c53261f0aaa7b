"""Configurations of runs on fixed rows: everything that is wrong at once, paths, rules between options, digest."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.errors import ConfigError
from engine.offline_checks import check_rows, commit_points, plan_offline
from engine.offline_loading import is_offline, load_offline
from engine.offlineconfig import OfflineConfig, digest_of, parse_recorded
from tests.helpers.configs import config as rlhf_config

CONTENT: dict[str, Any] = {
    "name": "ranked",
    "model": {"source": "model"},
    "data": {"train": [{"path": "pairs.jsonl"}], "max_prompt_tokens": 16, "max_tokens": 24},
    "objective": {"name": "reward_model"},
    "train": {"batch_size": 4},
    "steps": 10,
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The configuration as a YAML file beside what it names."""
    (tmp_path / "model").mkdir()
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "p", "chosen": "a", "rejected": "b"}\n')
    (tmp_path / "ranked.yaml").write_text(yaml.safe_dump(CONTENT))
    return tmp_path / "ranked.yaml"


def faults(file: Path, *overrides: str) -> dict[str, str]:
    """key -> remedy of everything that is wrong."""
    with pytest.raises(ConfigError) as error:
        load_offline(file, overrides)
    return {problem.key: problem.remedy for problem in error.value.problems}


def test_paths_are_relative_to_the_file(file: Path) -> None:
    config = load_offline(file)
    assert config.data.train[0].path == str(file.parent / "pairs.jsonl")
    assert config.model.source == str(file.parent / "model")
    assert config.iterations == config.steps == 10
    assert is_offline(file) and not is_offline({"name": "x", "reward": []})


def test_everything_wrong_is_said_at_once(file: Path) -> None:
    found = faults(file, "objective.beta=0.1", "steps=0", "train.mini_batches=2", "data.eval=[{path: gone.jsonl}]")
    assert found.keys() == {"objective.beta", "steps", "train.mini_batches", "data.eval[0].path"}
    assert "margin" in found["objective.beta"], "the options of this objective are named"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["objective={name: ppo}"], "objective.name"),
        (["objective={name: dpo, margin: data}"], "objective.margin"),
        (["objective={name: dpo, beta: 0}"], "objective.beta"),
        (["train.schedule=adaptive_kl", "train.kl_target=0.01"], "train.schedule"),
        (["train.zero_stage=2", "train.backend=torch"], "train.zero_stage"),
        (["train.momentum=0.9"], "train.momentum"),
        (["train.tensor_parallel=2", "train.backend=torch"], "train.tensor_parallel"),
        (["model.lora={rank: 4}", "train.backend=torch"], "model.lora"),
        (["placement={mode: local, ranks: 2}"], "placement.ranks"),
        (["placement.mode=split"], "placement.mode"),
        (["data.max_tokens=16"], "data.max_tokens"),
        (["data.train=[{path: pairs.jsonl, label_key: x}]"], "data.train[0].label_key"),
        (["objective.name=sft", "data.train=[{path: pairs.jsonl, chosen_key: x}]"], "data.train[0].chosen_key"),
        (["iterations=3"], "iterations"),
        (["train.warmup_steps=10"], "train.warmup_steps"),
        (["checkpoint.keep_best=2"], "checkpoint.keep_best"),
        (["data.eval=[{path: pairs.jsonl}]", "data.eval_fraction=0.5"], "data.eval_fraction"),
        (["data.max_bad_share=0.5"], "data.max_bad_share"),
        (["registry={model: m, tracking_uri: 'https://me:secret@host'}"], "registry.tracking_uri"),
        (["root=memory://bucket/runs"], "root"),
        (["reward=[{kind: exact_match}]"], "reward"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused(file: Path, monkeypatch: Any, overrides: list[str], key: str) -> None:
    monkeypatch.chdir(file.parent)
    assert key in faults(file, *overrides)


def test_adapters_are_for_language_models(file: Path) -> None:
    config = load_offline(file, ["objective.name=dpo", "model.lora={rank: 4}", "train.backend=torch"])
    assert config.model.lora is not None and config.model.lora.rank == 4


def parsed(**changed: Any) -> OfflineConfig:
    return OfflineConfig.model_validate({**CONTENT, **changed})


def test_weights_are_written_at_every_kth_and_every_measured_step_and_the_last() -> None:
    assert commit_points(parsed(checkpoint={"every": 4}, evaluation={"every": 3})) == [3, 4, 6, 8, 9, 10]
    assert commit_points(parsed()) == [10]
    plan = plan_offline(parsed(evaluation={"every": 5}), 20)
    assert (plan["rows"], plan["epochs"], plan["evaluations"], plan["checkpoints"]) == (40, 2.0, 3, 2)


def test_too_few_rows_are_refused() -> None:
    assert [problem.key for problem in check_rows(parsed(), 3, 0)] == ["train.batch_size", "data.eval"]
    assert check_rows(parsed(), 4, 1) == []


def test_the_digest_covers_what_changes_results() -> None:
    here = digest_of(parsed(), {})
    same = {
        "root": "/elsewhere",
        "checkpoint": {"every": 3},
        "placement": {"mode": "local"},
        "gate": {"min_score": 0.5},
    }
    assert all(digest_of(parsed(**{name: value}), {}) == here for name, value in same.items())
    assert digest_of(parsed(model={"source": "moved"}), {}) == here, "content counts, not its path"
    other = {
        "seed": 1,
        "steps": 11,
        "objective": {"name": "dpo"},
        "train": {"batch_size": 5},
        "evaluation": {"bins": 5},
    }
    assert all(digest_of(parsed(**{name: value}), {}) != here for name, value in other.items())
    assert digest_of(parsed(), {"model": "other"}) != here


def test_a_recorded_configuration_is_of_its_own_kind() -> None:
    config = parsed(objective={"name": "dpo", "variant": "ipo"})
    assert parse_recorded(config.model_dump(mode="json")) == config
    assert parse_recorded(rlhf_config().model_dump(mode="json")) == rlhf_config()
