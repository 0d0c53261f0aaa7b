"""`hybridflow run`, `resume` and `evaluate`: from a configuration or a run key to the result."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import environment
from engine.backends.imports import without
from engine.commands.conduct import Stage, conduct, log_to_run
from engine.commands.outcome import EXIT_CODES, Outcome
from engine.config import RunConfig
from engine.errors import ConfigError, Problem
from engine.offline_loading import is_offline
from engine.offlineconfig import LANGUAGE_MODELS, AnyConfig
from engine.preflight import preflight
from engine.remote import require_place
from engine.runs import new_run_key, open_run, run_folder

if TYPE_CHECKING:
    from tasks.refs import RunRef

log = logging.getLogger(__name__)


def run(
    config_file: str, overrides: list[str], run_key: str | None, *, skip_if_registered: bool, verbose: bool
) -> Outcome:
    """Make a run, or continue the one of this key, to its result."""
    config = checked(config_file, overrides)
    key = run_key or new_run_key(config.name)
    if skip_if_registered:
        return conduct(
            config.root, key, lambda stage: _unless_registered(config_file, overrides, key, stage), verbose=verbose
        )

    def begin() -> "RunRef":
        from tasks.data import start_run

        return start_run(config, key)

    return conduct(config.root, key, lambda stage: walk(begin, stage), verbose=verbose)


def resume(run_key: str, root: str, *, verbose: bool) -> Outcome:
    """Continue a recorded run behind its last committed step."""
    require_place(root)
    environment.stay_offline(open_run(root, run_key).config)

    def begin() -> "RunRef":
        from tasks.attempts import resume_run

        return resume_run(root, run_key)

    return conduct(root, run_key, lambda stage: walk(begin, stage), verbose=verbose)


def evaluate(config_file: str, overrides: list[str], source: str, *, verbose: bool) -> Outcome:
    """Greedy answers of a model on the suites of a configuration, kept as a run of its own."""
    config = checked(config_file, overrides)
    key = new_run_key(f"{config.name}-evaluation")

    def work(stage: Stage) -> Outcome:
        from flows.evaluate import evaluate as flow

        stage.wait_for_prefect()
        result = flow(config=str(Path(config_file).absolute()), source=source, overrides=overrides, run_key=key)
        return Outcome(result, "\n".join([f"{key}: {source}", *_scores(result), f"  folder: {result['run_dir']}"]))

    return conduct(config.root, key, work, verbose=verbose)


def checked(config_file: str, overrides: list[str]) -> RunConfig:
    """The configuration of a command. Raises ConfigError with everything that is wrong with it and its data."""
    check_no_objective(config_file)
    with without("torch", "sklearn", "scipy"):  # a faulty configuration is reported in a third of the time
        config = preflight(config_file, overrides)
    environment.stay_offline(config)
    return config


def check_no_objective(config_file: str) -> None:
    """Raises ConfigError where a configuration is one of a run on fixed rows, with the commands that take it."""
    if is_offline(config_file):
        command = "hybridflow sft, or hybridflow reward-model"
        remedy = f"a configuration with an objective learns from fixed rows; use {command}"
        raise ConfigError("The configuration is for another command.", problems=[Problem("objective", "...", remedy)])


def walk(begin: Callable[[], "RunRef"], stage: Stage) -> Outcome:
    """Make or take over the run, start its workers in the background, go through its flow."""
    from tasks import attempts, report, sessions
    from tasks.refs import opened

    log.info("The configuration is checked.")
    with without("sklearn", "scipy"):  # transformers takes seconds longer to load with them
        ref = begin()
    folder = run_folder(ref.root, ref.run_key)
    log_to_run(folder)
    log.info("Run %s is there, its data committed.", ref.run_key)
    report.set_display(stage.display)
    sessions.listen(stage.display.step)
    sessions.warm_up(ref)
    stage.display.stage(f"run {ref.run_key} in {folder}")
    flow = flow_of(opened(ref).config)
    if (plan := attempts.current(ref)["plan"]) is not None:
        stage.display.stage(plan)
    stage.wait_for_prefect()
    result = flow(run_key=ref.run_key, root=ref.root)
    return Outcome(result, describe(result), EXIT_CODES[result["status"]])


def flow_of(config: AnyConfig) -> Callable[..., dict[str, Any]]:
    """The flow that goes through a run of this configuration."""
    if isinstance(config, RunConfig):
        from flows.rlhf import rlhf

        return rlhf
    if config.objective.name in LANGUAGE_MODELS:
        from flows.sft import sft

        return sft
    from flows.reward_model import reward_model

    return reward_model


def _unless_registered(config_file: str, overrides: list[str], key: str, stage: Stage) -> Outcome:
    """Go through the flow, which looks into the registry before it makes the run."""
    from flows.rlhf import rlhf
    from tasks import report, sessions

    report.set_display(stage.display)
    sessions.listen(stage.display.step)
    stage.wait_for_prefect()
    file = str(Path(config_file).absolute())
    result = rlhf(config=file, overrides=overrides, run_key=key, skip_if_registered=True)
    if result["run_dir"] is None:
        model = result["model"]
        text = f"nothing to do: models:/{model['name']}/{model['version']} of run {result['run_key']} is the same"
        return Outcome(result, text)
    return Outcome(result, describe(result), EXIT_CODES[result["status"]])


def describe(result: dict[str, Any]) -> str:
    """The result of a finished run, for people."""
    done, reused = result["iterations_done"], result["iterations_reused"]
    lines = [f"{result['run_key']}: {result['status']}, {done} iterations in {result['seconds']:.0f} s"]
    if reused:
        lines[0] += f" ({reused} of them were made before)"
    lines += _scores(result)
    lines.append(f"  gate: {result['gate']['verdict']} ({'; '.join(result['gate']['reasons'])})")
    if model := result["model"]:
        aliases = ", ".join(model["aliases"]) or "no alias"
        lines.append(f"  model: models:/{model['name']}/{model['version']} ({aliases})")
    lines.append(f"  folder: {result['run_dir']}")
    return "\n".join(lines)


def _scores(result: dict[str, Any]) -> list[str]:
    lines = []
    for name, suite in result["evaluation"].items():
        before, after = (_score(suite[key]) for key in ("baseline_score_mean", "score_mean"))
        scores = after if suite["iteration"] == 0 else f"{before} -> {after}"
        lines.append(f"  {name}: {scores} on {suite['rows']} rows")
        if len(components := suite.get("components", {})) > 1:
            before = suite["baseline_components"]
            lines += [f"    {part}: {_score(before[part])} -> {_score(value)}" for part, value in components.items()]
        if "calibration_error" in suite:
            margin, error = suite["margin_mean"], suite["calibration_error"]
            lines.append(f"    mean margin {margin:.3f}, calibration error {error:.3f}")
    return lines


def _score(value: float | None) -> str:
    return "unscored" if value is None else f"{value:.4f}"
