"""Options: frozen, strict about names, and a digest of all that changes results and nothing else."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from engine.config import RunConfig, config_digest
from tests.helpers.configs import config, content

CONTENT = {"data/train": "1" * 64, "model": "2" * 64}


def digest(**changed: Any) -> str:
    return config_digest(config(**changed), CONTENT)


@pytest.mark.parametrize(
    "changed",
    [
        {"seed": 4},
        {"iterations": 4},
        {"train": {"lr": 1e-3}},
        {"train": {"epochs": 2}},
        {"rollout": {"temperature": 0.7}},
        {"rollout": {"stop": ["x"]}},
        {"algorithm": {"name": "ppo"}},
        {"algorithm": {"name": "grpo", "scale": "none"}},
        {"reward": [{"kind": "exact_match", "ignore_case": True}]},
        {"reward": [{"kind": "exact_match", "weight": 2.0}]},
        {"sft": {"steps": 1}},
        {"model": {"init": "pretrained"}},
        {"data": {"max_prompt_tokens": 17}},
        {"evaluation": {"every": 1}},
    ],
)
def test_the_digest_covers_what_changes_results(changed: dict[str, Any]):
    assert digest(**changed) != digest()


@pytest.mark.parametrize(
    "changed",
    [
        {"root": "elsewhere"},
        {"placement": {"mode": "split", "ranks": 4}},
        {"checkpoint": {"every": 5}},
        {"gate": {"min_score": 0.5}},
        {"max_unscored_share": 0.5},
        {"registry": {"model": "m"}},
        {"model": {"source": "moved"}},
        {"data": {"train": [{"path": "moved.jsonl"}]}},
    ],
)
def test_the_digest_leaves_out_paths_and_parallelism(changed: dict[str, Any]):
    assert digest(**changed) == digest()


SERVICE = {"kind": "http", "url": "http://scores"}
PATIENT = {"url": "http://moved", "retries": 9, "backoff_s": 2, "timeout_s": 3, "concurrency": 2, "batch_size": 7}


def test_a_service_may_move_and_be_waited_for_longer():
    assert digest(reward=[SERVICE | PATIENT | {"token_env": "T"}]) == digest(reward=[SERVICE])
    assert digest(reward=[SERVICE | {"weight": 2.0}]) != digest(reward=[SERVICE])


def test_a_scorer_of_harm_may_move_as_one_of_the_reward_may():
    safe = {"name": "safe_grpo", "cost_limit": 0.1}

    def with_cost(**scorer: Any) -> str:
        return digest(algorithm=safe, cost=[scorer])

    assert with_cost(**SERVICE | PATIENT) == with_cost(**SERVICE) != with_cost(**SERVICE, weight=2.0)
    assert with_cost(kind="model", source="one") == with_cost(kind="model", source="moved")


def test_a_schema_counts_with_all_that_it_says_about_a_property_called_path():
    one, other = ({"kind": "json_schema", "definition": {"properties": {"path": {"type": kind}}}} for kind in "ab")
    assert digest(reward=[one]) != digest(reward=[other])


def test_the_digest_covers_the_content_behind_the_paths():
    assert config_digest(config(), CONTENT) != config_digest(config(), CONTENT | {"data/train": "3" * 64})


def test_the_digest_is_the_same_for_a_configuration_read_back():
    again = RunConfig.model_validate_json(config().model_dump_json())
    assert config_digest(again, CONTENT) == digest()


def sections(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict):
        yield path
        for name, item in value.items():
            yield from sections(item, (*path, name))


COMPLETE = content(
    algorithm={"name": "ppo"},
    sft={"steps": 1},
    registry={"model": "m"},
    placement={},
    gate={},
    checkpoint={},
    evaluation={},
)


@pytest.mark.parametrize("path", list(sections(COMPLETE)), ids=".".join)
def test_unknown_options_are_refused_in_every_section(path: tuple[str, ...]):
    options = content(**{name: {} for name in path[:1]}) if path else content()
    options = {**COMPLETE, **options}
    section = options
    for name in path:
        section[name] = dict(COMPLETE[name] if section is options else section[name])
        section = section[name]
    section["no_such_option"] = 1
    with pytest.raises(ValidationError, match="no_such_option"):
        RunConfig.model_validate(options)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_rate_must_be_a_positive_finite_number(value: float):
    with pytest.raises(ValidationError):
        config(train={"lr": value})


def test_a_configuration_cannot_be_changed():
    with pytest.raises(ValidationError):
        config().train.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("name", ["", "a/b", "../x", ".hidden", "a b", "a" * 81])
def test_a_name_must_do_as_a_folder(name: str):
    with pytest.raises(ValidationError):
        config(name=name)


@pytest.mark.parametrize(
    ("reward", "needed"),
    [
        ({"kind": "exact_match"}, True),
        ({"kind": "number"}, True),
        ({"kind": "math"}, True),
        ({"kind": "regex", "pattern": "x"}, False),
        ({"kind": "reasoning_gym", "dataset": "chain_sum"}, False),
        ({"kind": "python", "function": "m:f"}, True),
        ({"kind": "python", "function": "m:f", "needs_answer": False}, False),
        ({"kind": "choice"}, True),
        ({"kind": "format"}, False),
        ({"kind": "json_schema"}, False),
        ({"kind": "length_penalty", "max_tokens": 2, "buffer_tokens": 1}, False),
        ({"kind": "repetition_penalty"}, False),
        ({"kind": "http", "url": "u"}, True),
        ({"kind": "http", "url": "u", "needs_answer": False}, False),
        ({"kind": "judge", "base_url": "u", "model": "m", "template": "{response} {answer}"}, True),
        ({"kind": "judge", "base_url": "u", "model": "m", "template": "{response}"}, False),
    ],
)
def test_who_needs_answers(reward: dict[str, Any], needed: bool):
    assert config(reward=[reward]).needs_answer is needed
    assert config(reward=[{"kind": "regex", "pattern": "x"}, reward]).needs_answer is needed


@pytest.mark.parametrize(
    ("algorithm", "needed"),
    [
        ({"name": "grpo"}, False),
        ({"name": "grpo", "kl_loss_coef": 0.1}, True),
        ({"name": "ppo"}, False),
        ({"name": "ppo", "kl_coef": 0.1}, True),
    ],
)
def test_who_needs_the_reference(algorithm: dict[str, Any], needed: bool):
    assert config(algorithm=algorithm).needs_reference is needed


def test_samples_per_iteration_is_prompts_times_samples():
    assert config().samples_per_iteration == 8 * 4


@pytest.mark.parametrize(
    "changed", [{"iterations": True}, {"seed": False}, {"train": {"lr": True}}, {"max_unscored_share": True}]
)
def test_true_and_false_are_no_numbers(changed: dict[str, Any]):
    with pytest.raises(ValidationError, match="true or false"):
        config(**changed)
