"""`hybridflow run`, `resume` and `evaluate`: from a configuration or a run key to the result."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import environment
from engine.backends.imports import without
from engine.checks import plan_steps
from engine.commands.conduct import Stage, conduct, log_to_run
from engine.commands.outcome import EXIT_CODES, Outcome
from engine.config import RunConfig
from engine.loading import refused
from engine.preflight import look_at_data, preflight
from engine.runs import new_run_key, open_run

if TYPE_CHECKING:
    from tasks.refs import RunRef

log = logging.getLogger(__name__)


def run(config_file: str, overrides: list[str], run_key: str | None, *, verbose: bool) -> Outcome:
    """Make a run, or continue the one of this key, to its result."""
    config = checked(config_file, overrides)
    key = run_key or new_run_key(config.name)

    def begin() -> "RunRef":
        from tasks.data import start_run

        return start_run(config, key)

    return conduct(config.root, key, lambda stage: _walk(begin, stage), verbose=verbose)


def resume(run_key: str, root: str, *, verbose: bool) -> Outcome:
    """Continue a recorded run behind its last committed step."""
    environment.stay_offline(open_run(root, run_key).config)

    def begin() -> "RunRef":
        from tasks.attempts import resume_run

        return resume_run(root, run_key)

    return conduct(root, run_key, lambda stage: _walk(begin, stage), verbose=verbose)


def dry_run(config_file: str, overrides: list[str]) -> Outcome:
    """Everything up to the prepared data, without writing a run: the plan, or one ConfigError with all problems."""
    config = checked(config_file, overrides)
    from tasks.models import source_of

    findings = look_at_data(config, source_of(config))
    if not findings.check.ok:
        raise refused(findings.check.problems)
    plan = {"train_rows": findings.train_rows, "eval_rows": findings.eval_rows, **plan_steps(config)}
    lengths = findings.check.report.to_json()["prompt_tokens"]
    content = {"status": "planned", "name": config.name, "root": config.root, "plan": plan, "prompt_tokens": lengths}
    lines = [f"{config.name}: nothing was started.", *(f"  {name:<24}{value:>12,}" for name, value in plan.items())]
    return Outcome(content, "\n".join(lines))


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
    with without("torch", "sklearn", "scipy"):  # a faulty configuration is reported in a third of the time
        config = preflight(config_file, overrides)
    environment.stay_offline(config)
    return config


def _walk(begin: Callable[[], "RunRef"], stage: Stage) -> Outcome:
    """Make or take over the run, start its workers in the background, go through the flow."""
    from tasks import report, sessions

    log.info("The configuration is checked.")
    with without("sklearn", "scipy"):  # transformers takes seconds longer to load with them
        ref = begin()
    folder = Path(ref.root) / ref.run_key
    log_to_run(folder)
    log.info("Run %s is there, its data committed.", ref.run_key)
    report.set_display(stage.display)
    sessions.listen(stage.display.step)
    sessions.warm_up(ref)
    stage.display.stage(f"run {ref.run_key} in {folder}")
    from flows.rlhf import rlhf

    stage.wait_for_prefect()
    result = rlhf(run_key=ref.run_key, root=ref.root)
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
    return lines


def _score(value: float | None) -> str:
    return "unscored" if value is None else f"{value:.4f}"
