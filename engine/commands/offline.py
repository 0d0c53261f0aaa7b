"""`hybridflow sft` and `hybridflow reward-model`: from a configuration with an objective to the registered model."""

from typing import TYPE_CHECKING

from engine import environment
from engine.backends.imports import without
from engine.commands.conduct import conduct
from engine.commands.outcome import Outcome
from engine.commands.running import walk
from engine.errors import ConfigError, Problem
from engine.loading import read_content, refused
from engine.offline_checks import plan_offline
from engine.offline_preflight import OfflineFindings, look_at_offline_data, preflight_offline
from engine.offlineconfig import LANGUAGE_MODELS, SCORE_MODELS, OfflineConfig
from engine.runs import new_run_key

if TYPE_CHECKING:
    from tasks.refs import RunRef

_OBJECTIVES = {"sft": LANGUAGE_MODELS, "reward-model": SCORE_MODELS}  # by command


def run(command: str, config_file: str, overrides: list[str], run_key: str | None, *, verbose: bool) -> Outcome:
    """Make a run, or continue the one of this key, to its result."""
    config = _checked(config_file, overrides)
    _check_objective(command, config)
    key = run_key or new_run_key(config.name)

    def begin() -> "RunRef":
        from tasks.offline_data import start_offline_run

        return start_offline_run(config, key)

    return conduct(config.root, key, lambda stage: walk(begin, stage), verbose=verbose)


def dry_run(command: str, config_file: str, overrides: list[str]) -> Outcome:
    """The plan of a run, or one ConfigError with all problems."""
    config = _checked(config_file, overrides)
    _check_objective(command, config)
    findings = _rows(config)
    if findings.check.problems:
        raise refused(findings.check.problems)
    rows = {"train_rows": len(findings.rows.train), "eval_rows": len(findings.rows.eval)}
    plan = rows | plan_offline(config, rows["train_rows"])
    content = {
        "status": "planned",
        "name": config.name,
        "root": config.root,
        "objective": config.objective.name,
        "plan": plan,
        "prompt_tokens": findings.check.report.to_json()["prompt_tokens"],
    }
    lines = [f"{config.name}: nothing was started.", *(f"  {name:<24}{value:>12,}" for name, value in plan.items())]
    return Outcome(content, "\n".join(lines))


def checked_rows(config_file: str, overrides: list[str]) -> OfflineFindings:
    """What the data of a configuration holds. Raises ConfigError where an option is faulty."""
    return _rows(_checked(config_file, overrides))


def _checked(config_file: str, overrides: list[str]) -> OfflineConfig:
    content = read_content(config_file)[0]
    if "reward" in content and "objective" not in content:
        remedy = "a configuration with rewards learns from the policy's own answers; use hybridflow run"
        raise ConfigError("The configuration is for another command.", problems=[Problem("reward", "...", remedy)])
    with without("torch", "sklearn", "scipy"):  # a faulty configuration is reported in a third of the time
        config = preflight_offline(config_file, overrides)
    environment.stay_offline(config)
    return config


def _rows(config: OfflineConfig) -> OfflineFindings:
    from tasks.models import source_of

    return look_at_offline_data(config, source_of(config))


def _check_objective(command: str, config: OfflineConfig) -> None:
    if config.objective.name in _OBJECTIVES[command]:
        return
    other = next(name for name, objectives in _OBJECTIVES.items() if config.objective.name in objectives)
    problem = Problem("objective.name", config.objective.name, f"use hybridflow {other}")
    raise ConfigError(f"hybridflow {command} takes {' and '.join(_OBJECTIVES[command])}.", problems=[problem])
