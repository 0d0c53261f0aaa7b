"""What is refused at load."""

import subprocess
import sys

import pytest

from engine.config import (
    ChoiceReward,
    ExactMatchReward,
    FormatReward,
    HttpReward,
    JsonSchemaReward,
    JudgeReward,
    LengthPenaltyReward,
    MathReward,
    NumberReward,
    PythonReward,
    ReasoningGymReward,
    RegexReward,
    RewardConfig,
)
from engine.reward.checks import check_rewards


def http(**changed: str) -> HttpReward:
    return HttpReward(**{"url": "https://scores.example:8443/v1?mode=fast", **changed})


def judge(**changed: float | str) -> JudgeReward:
    return JudgeReward(**{"base_url": "http://judge/v1", "model": "m", "template": "{response}", **changed})


def test_what_can_work_is_accepted() -> None:
    rewards: tuple[RewardConfig, ...] = (
        ExactMatchReward(),
        NumberReward(),
        MathReward(),
        RegexReward(pattern=r"\d+"),
        ReasoningGymReward(dataset="chain_sum"),
        PythonReward(function="tests.unit.reward.functions:length"),
        PythonReward(function="json:dumps"),
        ChoiceReward(choices="ABCDE"),
        FormatReward(),
        JsonSchemaReward(definition={"type": "object"}),
        LengthPenaltyReward(max_tokens=20, buffer_tokens=20),
        http(),
        judge(),
    )
    assert check_rewards(rewards) == []


@pytest.mark.parametrize(
    ("reward", "key", "found"),
    [
        (RegexReward(pattern="(a"), "reward[1].pattern", "unterminated subpattern"),
        (ReasoningGymReward(dataset="chain_sums"), "reward[1].dataset", "chain_sum"),
        (PythonReward(function="no_such_module:score"), "reward[1].function", "PYTHONPATH"),
        (PythonReward(function="tests.unit.reward.absent:score"), "reward[1].function", "PYTHONPATH"),
        (PythonReward(function="tests.absent.functions:score"), "reward[1].function", "PYTHONPATH"),
        (PythonReward(function="json.decoder.deeper:score"), "reward[1].function", "PYTHONPATH"),
        (PythonReward(function=".functions:score"), "reward[1].function", "PYTHONPATH"),
        (ChoiceReward(choices="ABA"), "reward[1].choices", "twice"),
        (FormatReward(tags=("a", "a")), "reward[1].tags", "twice"),
        (JsonSchemaReward(), "reward[1].definition", "accepts everything"),
        (JsonSchemaReward(definition={"type": "objekt"}), "reward[1].definition", "is no JSON schema"),
        (JsonSchemaReward(path="absent.json"), "reward[1].path", "no such file"),
        (JsonSchemaReward(path="a.json", definition={"type": "object"}), "reward[1].path", "not both"),
        (LengthPenaltyReward(max_tokens=20, buffer_tokens=21), "reward[1].buffer_tokens", "max_tokens, 20"),
        (http(url="scores.example/v1"), "reward[1].url", "is no address"),
        (http(url="ftp://scores.example"), "reward[1].url", "is no address"),
        (http(url="http://"), "reward[1].url", "is no address"),
        (http(url="http://scores:port/"), "reward[1].url", "is no address"),
        (http(url="http://[::1"), "reward[1].url", "is no address"),
        (http(token_env="NO_SUCH_VARIABLE"), "reward[1].token_env", "export it"),
        (judge(base_url="judge"), "reward[1].base_url", "is no address"),
        (judge(template="Judge {reponse}"), "reward[1].template", "{response}"),
        (judge(pattern="("), "reward[1].pattern", "no regular expression"),
        (judge(pattern=r"\d+"), "reward[1].pattern", "exactly one group"),
        (judge(pattern=r"(\d)(\d)"), "reward[1].pattern", "exactly one group"),
        (judge(low=3.0, high=3.0), "reward[1].low", "below high, 3"),
        (judge(token_env="NO_SUCH_VARIABLE"), "reward[1].token_env", "export it"),
    ],
)
def test_each_problem_names_key_value_and_remedy(reward: RewardConfig, key: str, found: str) -> None:
    problems = check_rewards((ExactMatchReward(), reward))
    assert [problem.key for problem in problems] == [key]
    assert found in problems[0].remedy


@pytest.mark.parametrize(
    "url",
    [
        "https://tok-CANARY-123@scores.example/v1",
        "https://user:tok-CANARY-123@scores.example/v1",
        "https://scores.example/v1?api_key=tok-CANARY-123",
        "https://scores.example/v1?a=1&access_token=tok-CANARY-123",
        "https://user:tok-CANARY-123@scores.example:port/v1",
    ],
)
def test_a_secret_in_an_address_is_refused_and_not_repeated(url: str) -> None:
    for reward, key in ((http(url=url), "reward[0].url"), (judge(base_url=url), "reward[0].base_url")):
        problems = check_rewards((reward,))
        assert [problem.key for problem in problems] == [key]
        assert "CANARY" not in str(problems[0])


def test_another_machine_may_have_another_environment() -> None:
    assert check_rewards((http(token_env="NO_SUCH_VARIABLE"),), elsewhere=True) == []


@pytest.mark.parametrize(
    ("reward", "library", "package"),
    [
        (MathReward(), "math_verify", "math-verify"),
        (ReasoningGymReward(dataset="chain_sum"), "reasoning_gym", "reasoning-gym"),
    ],
)
def test_a_missing_library_is_named(
    monkeypatch: pytest.MonkeyPatch, reward: RewardConfig, library: str, package: str
) -> None:
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr("sys.path_importer_cache", {})
    monkeypatch.delitem(sys.modules, library, raising=False)
    problems = check_rewards((reward,))
    assert [problem.key for problem in problems] == ["reward[0].kind"]
    assert f"pip install {package}" in problems[0].remedy


def test_no_user_module_runs_while_it_is_looked_for() -> None:
    assert check_rewards((PythonReward(function="tests.unit.reward.import_fails:score"),)) == []


def test_neither_reward_nor_checks_load_a_heavy_library() -> None:
    code = (
        "import sys, engine.reward.combine, engine.reward.checks\n"
        "heavy = {'torch', 'ray', 'prefect', 'mlflow', 'numpy', 'sympy', 'math_verify', 'reasoning_gym', 'pebble'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
