"""What is refused at load."""

import subprocess
import sys

import pytest

from engine.config import (
    ExactMatchReward,
    MathReward,
    NumberReward,
    PythonReward,
    ReasoningGymReward,
    RegexReward,
    RewardConfig,
)
from engine.reward.checks import check_rewards


def test_what_can_work_is_accepted() -> None:
    rewards: tuple[RewardConfig, ...] = (
        ExactMatchReward(),
        NumberReward(),
        MathReward(),
        RegexReward(pattern=r"\d+"),
        ReasoningGymReward(dataset="chain_sum"),
        PythonReward(function="tests.unit.reward.functions:length"),
        PythonReward(function="json:dumps"),
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
    ],
)
def test_each_problem_names_key_value_and_remedy(reward: RewardConfig, key: str, found: str) -> None:
    problems = check_rewards((ExactMatchReward(), reward))
    assert [problem.key for problem in problems] == [key]
    assert found in problems[0].remedy


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
