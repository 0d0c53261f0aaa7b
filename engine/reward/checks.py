"""What can be found wrong with `reward` before any process starts; the libraries themselves are not imported here."""

import difflib
import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec, PathFinder

from engine.config import (
    ChoiceReward,
    FormatReward,
    HttpReward,
    JsonSchemaReward,
    JudgeReward,
    LengthPenaltyReward,
    MathReward,
    PythonReward,
    ReasoningGymReward,
    RegexReward,
    RewardConfig,
)
from engine.errors import Problem
from engine.reward.servicechecks import check_pattern, check_service

_LIST_DATASETS = "from reasoning_gym.factory import DATASETS; import reasoning_gym; print(*sorted(DATASETS))"


def check_rewards(
    rewards: tuple[RewardConfig, ...], section: str = "reward", *, elsewhere: bool = False
) -> list[Problem]:
    """Problems of the entries of a section, `reward` or `cost`, each with key, value and remedy.

    Takes milliseconds, with a reasoning_gym entry seconds (its data sets are listed by another process). Whether a
    function exists in its module, and whether it or a service works, only the canary can tell. elsewhere: the run is
    planned for another machine, so the environment of this one does not count.
    """
    problems: list[Problem] = []
    for position, reward in enumerate(rewards):
        key = f"{section}[{position}]"
        if isinstance(reward, HttpReward | JudgeReward):
            problems += check_service(key, reward, elsewhere=elsewhere)
        elif isinstance(reward, MathReward | ReasoningGymReward | PythonReward):
            problems += _check_library(key, reward)
        else:
            problems += _check_rule(key, reward)
    return problems


def _check_library(key: str, reward: MathReward | ReasoningGymReward | PythonReward) -> list[Problem]:
    match reward:
        case MathReward():
            return _check_installed(f"{key}.kind", "math", "math_verify", "math-verify")
        case ReasoningGymReward():
            return _check_dataset(key, reward.dataset)
        case PythonReward():
            return check_module(f"{key}.function", reward.function)


def _check_rule(key: str, reward: RewardConfig) -> list[Problem]:
    match reward:
        case RegexReward():
            return check_pattern(f"{key}.pattern", reward.pattern)
        case ChoiceReward():
            return _check_unique(f"{key}.choices", reward.choices)
        case FormatReward():
            return _check_unique(f"{key}.tags", reward.tags)
        case JsonSchemaReward():
            return _check_schema(key, reward)
        case LengthPenaltyReward():
            return _check_buffer(key, reward)
        case _:
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


def check_module(key: str, path: str) -> list[Problem]:
    """Whether the module of `package.module` or `package.module:function` is there; it is not imported."""
    module, _, _ = path.partition(":")
    if _find_without_import(module) is not None:
        return []
    remedy = f"the module {module} cannot be found; install its package or put its folder on PYTHONPATH"
    return [Problem(key, path, remedy)]


def _find_without_import(module: str) -> ModuleSpec | None:
    """The module's spec; unlike importlib's own function, a parent package is not run to find it."""
    parts = module.split(".")
    spec = importlib.util.find_spec(parts[0]) if parts[0] else None
    for depth in range(2, len(parts) + 1):
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(".".join(parts[:depth]), list(spec.submodule_search_locations))
    return spec


def _check_unique(key: str, names: str | tuple[str, ...]) -> list[Problem]:
    if len(set(names)) == len(names):
        return []
    return [Problem(key, names, "names one twice; name each once")]


def _check_schema(key: str, reward: JsonSchemaReward) -> list[Problem]:
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for

    if reward.path is not None:  # loading puts a readable file's content into the definition
        remedy = "give the schema either here or as definition, not both"
        if not reward.definition:
            remedy = "there is no such file, or it holds no JSON object; correct the path"
        return [Problem(f"{key}.path", reward.path, remedy)]
    if not reward.definition:
        return [Problem(f"{key}.definition", {}, "accepts everything; give a schema here or the path of its file")]
    try:
        validator_for(reward.definition).check_schema(reward.definition)
    except SchemaError as error:
        return [Problem(f"{key}.definition", error.json_path, f"is no JSON schema: {error.message}")]
    return []


def _check_buffer(key: str, reward: LengthPenaltyReward) -> list[Problem]:
    if reward.buffer_tokens <= reward.max_tokens:
        return []
    remedy = f"must not be more than max_tokens, {reward.max_tokens}: the penalty begins that far below it"
    return [Problem(f"{key}.buffer_tokens", reward.buffer_tokens, remedy)]
