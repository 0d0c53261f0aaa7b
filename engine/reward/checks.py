"""What can be found wrong with `reward` before any process starts; the libraries themselves are not imported here."""

import difflib
import importlib.util
import re
import subprocess
import sys
from importlib.machinery import ModuleSpec, PathFinder

from engine.config import MathReward, PythonReward, ReasoningGymReward, RegexReward, RewardConfig
from engine.errors import Problem

_LIST_DATASETS = "from reasoning_gym.factory import DATASETS; import reasoning_gym; print(*sorted(DATASETS))"


def check_rewards(rewards: tuple[RewardConfig, ...]) -> list[Problem]:
    """Problems of the entries, each with key, value and remedy.

    Takes milliseconds, with a reasoning_gym entry seconds (its data sets are listed by another process). Whether a
    function exists in its module, and works, only the canary can tell.
    """
    problems: list[Problem] = []
    for position, reward in enumerate(rewards):
        key = f"reward[{position}]"
        match reward:
            case RegexReward():
                problems += _check_pattern(f"{key}.pattern", reward.pattern)
            case MathReward():
                problems += _check_installed(f"{key}.kind", "math", "math_verify", "math-verify")
            case ReasoningGymReward():
                problems += _check_dataset(key, reward.dataset)
            case PythonReward():
                problems += _check_module(f"{key}.function", reward.function)
            case _:
                pass
    return problems


def _check_pattern(key: str, pattern: str) -> list[Problem]:
    try:
        re.compile(pattern)
    except re.error as error:
        return [Problem(key, pattern, f"is no regular expression: {error}. Correct it; mind YAML's own escapes")]
    return []


def _check_installed(key: str, kind: str, module: str, package: str) -> list[Problem]:
    if importlib.util.find_spec(module) is not None:
        return []
    return [Problem(key, kind, f"needs the package {package}, which is not installed: pip install {package}")]


def _check_dataset(key: str, dataset: str) -> list[Problem]:
    if missing := _check_installed(f"{key}.kind", "reasoning_gym", "reasoning_gym", "reasoning-gym"):
        return missing
    command = [sys.executable, "-c", _LIST_DATASETS]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if listed.returncode != 0:
        remedy = f"cannot be imported; reinstall reasoning-gym. {listed.stderr.strip()}"
        return [Problem(f"{key}.kind", "reasoning_gym", remedy)]
    names = listed.stdout.split()
    if dataset in names:
        return []
    close = difflib.get_close_matches(dataset, names) or names
    return [Problem(f"{key}.dataset", dataset, f"is no reasoning-gym data set; use one of {', '.join(close)}")]


def _check_module(key: str, function: str) -> list[Problem]:
    module, _, _ = function.partition(":")
    if _find_without_import(module) is not None:
        return []
    remedy = f"the module {module} cannot be found; install its package or put its folder on PYTHONPATH"
    return [Problem(key, function, remedy)]


def _find_without_import(module: str) -> ModuleSpec | None:
    """The module's spec; unlike importlib's own function, a parent package is not run to find it."""
    parts = module.split(".")
    spec = importlib.util.find_spec(parts[0]) if parts[0] else None
    for depth in range(2, len(parts) + 1):
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(".".join(parts[:depth]), list(spec.submodule_search_locations))
    return spec
