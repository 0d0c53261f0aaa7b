"""YAML to configuration: one message with everything, files relative to what the user would expect."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from engine.errors import ConfigError, Problem
from engine.loading import load_config, parse_config
from tests.helpers.configs import content, write_config, write_rows


def problems_of(source: Any, *overrides: str) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        load_config(source, list(overrides))
    assert caught.value.exit_code == 2
    for problem in caught.value.problems:
        assert problem.remedy and f"  - {problem}" in str(caught.value)
    return {problem.key: problem for problem in caught.value.problems}


def test_a_valid_file_loads(tmp_path: Path):
    config = load_config(write_config(tmp_path))
    assert (config.name, config.seed, config.iterations) == ("sums", 3, 3)
    assert config.data.train[0].path == str(tmp_path / "sums.jsonl")


def test_the_content_of_a_file_loads_like_the_file_and_is_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = write_config(tmp_path)
    monkeypatch.chdir(tmp_path)
    options = content()
    assert load_config(options, ["train.lr=0.5"]) == load_config(file, ["train.lr=0.5"])
    assert options == content()


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "0.0001", "'1e-4'", "1_0e-5"])
def test_a_number_may_be_written_in_every_usual_way(tmp_path: Path, text: str):
    file = write_config(tmp_path)
    file.write_text(file.read_text() + f"sft: {{steps: 5, lr: {text}}}\n")
    assert load_config(file).sft.lr == 1e-4
    assert load_config(file, [f"train.lr={text}"]).train.lr == 1e-4


@pytest.mark.parametrize("text", ["e4", "1e", "abc-1e-4", "1e-4x"])
def test_what_only_looks_like_a_number_is_refused(tmp_path: Path, text: str):
    assert "train.lr" in problems_of(write_config(tmp_path), f"train.lr={text}")


@pytest.mark.parametrize("text", ["1:30", "1:30.5", "-1:30"])
def test_minutes_and_seconds_are_no_number(tmp_path: Path, text: str):
    """YAML 1.1 would read 1:30 as 90."""
    file = write_config(tmp_path)
    file.write_text(file.read_text() + f"placement: {{timeout_s: {text}}}\n")
    assert problems_of(file)["placement.timeout_s"].value == text
    assert problems_of(write_config(tmp_path), f"iterations={text}")["iterations"].value == text
    assert load_config(write_config(tmp_path), ["name=a1"]).name == "a1"


@pytest.mark.parametrize("text", ["sft: &a {steps: *a}", "x: &a [1, [*a]]", "x: &a\n  <<: *a\n"])
def test_an_alias_inside_of_what_it_repeats_is_refused_with_its_line(tmp_path: Path, text: str):
    file = write_config(tmp_path)
    lines = file.read_text().count("\n")
    file.write_text(file.read_text() + text + "\n")
    assert f"(line {lines + 1}, " in problems_of(file)["CONFIG"].remedy
    assert "an alias repeats" in problems_of(write_config(tmp_path), "data.train=&a [*a]")["--set"].remedy


def test_an_alias_beside_what_it_repeats_is_allowed(tmp_path: Path):
    file = write_config(tmp_path)
    file.write_text(file.read_text().replace("iterations: 3", "iterations: &n 5").replace("seed: 3", "seed: *n"))
    assert load_config(file).seed == 5


def test_a_byte_order_mark_changes_nothing(tmp_path: Path):
    file = write_config(tmp_path)
    before = load_config(file)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert load_config(file) == before


class TestKeysGivenTwice:
    def test_are_refused_with_both_lines(self, tmp_path: Path):
        file = write_config(tmp_path)
        file.write_text("name: first\n" + file.read_text())
        line = 1 + file.read_text().splitlines()[1:].index("name: sums") + 1
        problem = problems_of(file)["name"]
        assert str(line) in problem.value and "line 1" in problem.remedy

    def test_are_found_in_lists_and_sections(self, tmp_path: Path):
        text = yaml.safe_dump(content(reward=None, train=None))
        text += "reward: [{kind: exact_match, weight: 1.0, weight: 2.0}]\ntrain: {lr: 1.0, epochs: 1, lr: 2.0}\n"
        assert {"reward[0].weight", "train.lr"} <= problems_of(write_config(tmp_path, text)).keys()

    def test_the_same_key_in_two_sections_is_fine(self, tmp_path: Path):
        load_config(write_config(tmp_path, train={"lr": 0.1}, sft={"steps": 2, "lr": 0.1}))


class TestNoMapping:
    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("", "nothing"),
            ("- a\n- b\n", "list"),
            ("a: [1, 2\nb: 3\n", "line 2"),
            ("a: !!python/object:os.system {}\n", "python/object"),
            ("a: 1\n---\nb: 2\n", "document"),
            ("\tname: x\n", "line 1"),
        ],
    )
    def test_the_message_says_what_the_file_holds(self, tmp_path: Path, text: str, found: str):
        problem = problems_of(write_config(tmp_path, text))["CONFIG"]
        assert str(tmp_path / "sums.yaml") == problem.value and found in problem.remedy

    def test_a_file_that_is_not_there(self, tmp_path: Path):
        assert "No such file" in problems_of(tmp_path / "no.yaml")["CONFIG"].remedy

    def test_a_folder(self, tmp_path: Path):
        assert "directory" in problems_of(tmp_path)["CONFIG"].remedy

    def test_bytes_that_are_no_text(self, tmp_path: Path):
        file = write_config(tmp_path)
        file.write_bytes(b"name: \xff\xfe\x00")
        assert "no valid YAML" in problems_of(file)["CONFIG"].remedy


class TestOverrides:
    def test_values_are_yaml(self, tmp_path: Path):
        changes = ["rollout.stop=['\\n', end]", "train.gradient_checkpointing=true", "sft.steps=4", "seed=9"]
        config = load_config(write_config(tmp_path), changes)
        assert config.rollout.stop == ("\\n", "end") and config.train.gradient_checkpointing is True
        assert config.sft.steps == 4 and config.seed == 9

    def test_the_last_one_of_a_key_counts(self, tmp_path: Path):
        assert load_config(write_config(tmp_path), ["seed=1", "seed=2"]).seed == 2

    def test_a_value_may_hold_an_equals_sign(self, tmp_path: Path):
        config = load_config(write_config(tmp_path), ["reward=[{kind: regex, pattern: 'a=b'}]"])
        assert config.reward[0].pattern == "a=b"

    def test_null_removes_a_section(self, tmp_path: Path):
        assert load_config(write_config(tmp_path, sft={"steps": 3}), ["sft=null"]).sft is None

    @pytest.mark.parametrize("key", ["reward.0.weight", "reward[0].weight"])
    def test_entries_of_a_list_are_named_by_number(self, tmp_path: Path, key: str):
        assert load_config(write_config(tmp_path), [f"{key}=0.5"]).reward[0].weight == 0.5

    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("seed", "section.option=value"),
            ("=3", "section.option=value"),
            ("a..b=3", "section.option=value"),
            ("reward.1.weight=2", "1 entries"),
            ("reward.weight=2", "a list"),
            ("name.first=2", "no section"),
            ("seed=[1", "no valid YAML"),
        ],
    )
    def test_what_cannot_be_applied_is_reported(self, tmp_path: Path, text: str, found: str):
        problem = problems_of(write_config(tmp_path), text)["--set"]
        assert problem.value == text and found in problem.remedy

    def test_an_unknown_option_is_reported_like_one_in_the_file(self, tmp_path: Path):
        assert "did you mean seed?" in problems_of(write_config(tmp_path), "sed=3")["sed"].remedy


class TestUnknown:
    def test_options_name_the_nearest_one(self, tmp_path: Path):
        found = problems_of(write_config(tmp_path, train={"warmup_step": 3}, iteration=4))
        assert "did you mean warmup_steps?" in found["train.warmup_step"].remedy
        assert "did you mean iterations?" in found["iteration"].remedy

    def test_options_in_the_wrong_section_name_the_right_one(self, tmp_path: Path):
        assert "train.lr" in problems_of(write_config(tmp_path, lr=0.1))["lr"].remedy

    def test_options_unlike_any_other_name_those_there_are(self, tmp_path: Path):
        remedy = problems_of(write_config(tmp_path, gate={"zzz": 1}))["gate.zzz"].remedy
        assert "min_gain" in remedy and "min_score" in remedy

    def test_algorithms_name_the_known_ones(self, tmp_path: Path):
        problem = problems_of(write_config(tmp_path, algorithm={"name": "grpoo"}))["algorithm.name"]
        assert (
            problem.value == "grpoo"
            and "ppo, grpo, dr_grpo" in problem.remedy
            and "did you mean grpo?" in problem.remedy
        )

    def test_rewards_name_the_known_kinds(self, tmp_path: Path):
        rewards = [{"kind": "exact_match"}, {"kind": "exactmatch"}, {"weight": 1.0}]
        found = problems_of(write_config(tmp_path, reward=rewards))
        assert "did you mean exact_match?" in found["reward[1].kind"].remedy
        assert "is missing" in found["reward[2].kind"].remedy and "regex" in found["reward[2].kind"].remedy

    def test_backends_name_the_known_ones(self, tmp_path: Path):
        problem = problems_of(write_config(tmp_path, rollout={"backend": "vlm"}))["rollout.backend"]
        assert "vllm, hf" in problem.remedy and "did you mean vllm?" in problem.remedy

    def test_options_of_another_algorithm_are_refused(self, tmp_path: Path):
        assert "algorithm.lam" in problems_of(write_config(tmp_path, algorithm={"name": "grpo", "lam": 0.9}))

    def test_a_name_of_the_users_own_hides_no_option_below_it(self, tmp_path: Path):
        file = write_config(tmp_path, placement={"mode": "map", "pools": {"ranks": {"rank": 2}}}, resources={})
        assert problems_of(file)["placement.pools.ranks.rank"].remedy == "is no option here; did you mean ranks?"
        assert "placement.pools.NAME.resources" in problems_of(file)["resources"].remedy

    def test_keys_that_yaml_reads_as_something_else(self, tmp_path: Path):
        file = write_config(tmp_path)
        file.write_text(file.read_text() + "on: 3\n")
        assert len(problems_of(file)) == 1


class TestOneMessage:
    def test_faults_of_every_kind_are_reported_together(self, tmp_path: Path):
        file = write_config(
            tmp_path,
            algorithm={"name": "grpoo"},
            train={"lr": -1.0, "mini_batches": 5, "optimiser": "adam"},
            placement={"mode": "standalone", "ranks": 500},
            gate={"suite": "other"},
            data={"train": [{"path": "sums.jsonl"}, {"path": "missing.jsonl"}]},
        )
        found = problems_of(file, "seed=x", "nonsense")
        assert {
            "algorithm.name",
            "train.lr",
            "train.optimiser",
            "train.mini_batches",
            "placement.mode",
            "gate.suite",
            "data.train[1].path",
            "seed",
            "--set",
        } == found.keys()

    def test_rules_about_an_option_that_does_not_parse_are_left_out(self, tmp_path: Path):
        found = problems_of(write_config(tmp_path, train={"mini_batches": "five"}, iterations="x"))
        assert found.keys() == {"train.mini_batches", "iterations"}

    @pytest.mark.parametrize("name", ["name", "model", "data", "reward", "iterations"])
    def test_a_missing_section_hides_nothing_else(self, tmp_path: Path, name: str):
        found = problems_of(write_config(tmp_path, **{name: None}), "gate.suite=other", "foo=1")
        assert found.keys() == {name, "gate.suite", "foo"}
        assert "is missing" in found[name].remedy

    @pytest.mark.parametrize(
        ("section", "value", "key"),
        [
            ("model", {"source": None}, "model.source"),
            ("data", {"train": []}, "data.train"),
            ("data", {"train": [{}]}, "data.train[0].path"),
            ("data", {"train": ["sums.jsonl"]}, "data.train[0]"),
            ("sft", {"lr": 1.0}, "sft.steps"),
            ("registry", {}, "registry.model"),
            ("registry", {"model": 3}, "registry.model"),
            ("reward", [{"kind": "regex"}], "reward[0].pattern"),
            ("reward", [5], "reward[0]"),
            ("evaluation", {"suites": [{"data": [{"path": 4}]}]}, "evaluation.suites[0].data[0].path"),
            ("train", 5, "train"),
            ("train", {"betas": [0.9]}, "train.betas[1]"),
            ("rollout", {"stop": [1]}, "rollout.stop[0]"),
        ],
    )
    def test_a_fault_at_any_depth_hides_nothing_else(self, tmp_path: Path, section: str, value: Any, key: str):
        found = problems_of(
            write_config(tmp_path, **{section: value}), "foo=1", "placement.mode=split", "placement.rollout_ranks=99"
        )
        assert found.keys() == {key, "foo", "placement.mode"}

    def test_the_found_value_is_shown_and_a_long_one_is_cut(self, tmp_path: Path):
        problem = problems_of(write_config(tmp_path, rubbish={"key": ["x" * 50] * 50}))["rubbish"]
        assert len(str(problem)) < 600

    def test_what_can_be_parsed_is_returned_beside_the_problems(self, tmp_path: Path):
        parsed = parse_config(write_config(tmp_path, train={"lr": "x", "epochs": 7}))
        assert parsed.config is not None and parsed.config.train.epochs == 7
        assert parsed.unknown == {"train.lr"}


class TestPaths:
    def test_inputs_are_relative_to_the_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        file = write_config(tmp_path / "configs", sft={"steps": 2, "data": [{"path": "sums.jsonl"}]})
        monkeypatch.chdir(tmp_path)
        config = load_config(Path("configs/sums.yaml"))
        assert config.data.train[0].path == config.sft.data[0].path == str(file.parent / "sums.jsonl")
        assert config.model.source == str(file.parent / "model")

    def test_inputs_given_with_set_are_relative_to_the_current_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        file = write_config(tmp_path / "configs")
        write_rows(tmp_path / "here.jsonl")
        monkeypatch.chdir(tmp_path)
        for change in ("data.train.0.path=here.jsonl", "data.train=[{path: here.jsonl}]"):
            assert load_config(file, [change]).data.train[0].path == str(tmp_path / "here.jsonl")

    def test_outputs_are_relative_to_the_current_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        file = write_config(tmp_path / "configs", registry={"model": "m", "tracking_uri": "sqlite:///db/mlflow.db"})
        monkeypatch.chdir(tmp_path)
        config = load_config(file)
        assert config.root == str(tmp_path / "runs")
        assert config.registry.tracking_uri == f"sqlite:///{tmp_path}/db/mlflow.db"

    @pytest.mark.parametrize("source", ["owner/model", "models:/sums@champion", "runs:some-run/3", "gpt2"])
    def test_sources_that_are_no_paths_stay_as_they_are(self, tmp_path: Path, source: str):
        assert load_config(write_config(tmp_path, model={"source": source})).model.source == source

    @pytest.mark.parametrize("source", ["./nowhere", "/nowhere/at/all", "weights.gguf", "~no-such-user/x"])
    def test_a_model_path_that_is_not_there_is_a_problem(self, tmp_path: Path, source: str):
        assert "no such file" in problems_of(write_config(tmp_path, model={"source": source}))["model.source"].remedy

    def test_a_data_set_of_the_hub_stays_as_it_is(self, tmp_path: Path):
        config = load_config(write_config(tmp_path, data={"train": [{"path": "owner/name-1.5"}]}))
        assert config.data.train[0].path == "owner/name-1.5"

    def test_missing_files_are_all_reported_with_their_full_path(self, tmp_path: Path):
        file = write_config(
            tmp_path,
            data={"train": [{"path": "a.jsonl"}], "eval": [{"path": "sub/b.jsonl"}], "eval_fraction": 0.01},
            sft={"steps": 2, "data": [{"path": "c.csv"}]},
            evaluation={"suites": [{"name": "held_out"}, {"name": "x", "data": [{"path": "d.parquet"}]}]},
        )
        found = problems_of(file)
        assert found["data.train[0].path"].value == str(tmp_path / "a.jsonl")
        assert found["data.eval[0].path"].value == str(tmp_path / "sub" / "b.jsonl")
        assert {"sft.data[0].path", "evaluation.suites[1].data[0].path"} <= found.keys()


class TestSchemas:
    REWARD: ClassVar = [{"kind": "json_schema", "path": "schemas/person.json"}]

    def file(self, folder: Path, text: str = '{"type": "object"}') -> Path:
        (folder / "schemas").mkdir()
        (folder / "schemas" / "person.json").write_text(text)
        return write_config(folder, reward=self.REWARD)

    def test_become_part_of_the_configuration(self, tmp_path: Path):
        """A resumed run needs the file no more, and another content is another run."""
        reward = load_config(self.file(tmp_path)).reward[0]
        assert (reward.definition, reward.path) == ({"type": "object"}, None)

    def test_are_found_from_the_current_folder_by_set(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        self.file(tmp_path)
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path)
        file = write_config(tmp_path / "elsewhere", reward=self.REWARD)
        changed = load_config(file, ["reward.0.path=schemas/person.json"])
        assert changed.reward[0].definition == {"type": "object"}

    @pytest.mark.parametrize("text", ["", "[1]", '{"type": '])
    def test_that_cannot_be_read_are_reported(self, tmp_path: Path, text: str):
        assert "holds no JSON object" in problems_of(self.file(tmp_path, text))["reward[0].path"].remedy

    def test_that_are_none_are_reported(self, tmp_path: Path):
        found = problems_of(self.file(tmp_path, '{"type": "objekt"}'))
        assert "is no JSON schema" in found["reward[0].definition"].remedy


@pytest.mark.parametrize("name", ["token", "api_key", "hf_token", "password"])
def test_a_secret_given_to_an_option_that_does_not_exist_is_not_repeated(tmp_path: Path, name: str):
    rewards = [{"kind": "http", "url": "http://scores", name: "tok-CANARY-123"}]
    assert problems_of(write_config(tmp_path, reward=rewards))[f"reward[0].{name}"].value == "***"


@pytest.mark.parametrize("url", ["https://me:CANARY@scores/v1", "https://scores/v1?token=CANARY"])
def test_an_address_with_a_secret_is_shown_by_its_host_alone(tmp_path: Path, url: str):
    found = problems_of(write_config(tmp_path, reward=[{"kind": "http", "url": url}]))["reward[0].url"]
    assert found.value == "https://scores/***" and "token_env" in found.remedy


@pytest.mark.parametrize(("key", "value"), [("algorithm", "grpo"), ("train", 3)])
def test_a_value_where_a_section_belongs_is_refused_in_plain_words(tmp_path: Path, key: str, value: str | int):
    assert problems_of(write_config(tmp_path, **{key: value}))[key].remedy.startswith("must be a section with options")
