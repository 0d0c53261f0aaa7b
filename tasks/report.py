"""What a run tells: progress while it goes, one table per run, the final report and the result that the command prints."""

import logging
import re
import time
from typing import Any, Protocol
from uuid import UUID

import httpx
from prefect import get_client
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.client.schemas.actions import ArtifactCreate

from engine.errors import StoreError
from engine.runs import Run, write_json
from engine.store import Manifest, StepRef, step_path
from tasks.attempts import current, done_of, finish
from tasks.gate import verdict_of
from tasks.refs import RunRef, opened
from tasks.tracking import track

log = logging.getLogger(__name__)
RESULT_FILE = "report.json"
_EVERY_S = 10.0  # between two messages to Prefect and MLflow; iterations may take less than telling about them
_ROWS = 20  # of the newest iterations, in the table of a run that goes on
_COLUMNS = (
    "reward/score_mean",
    "reward/score_std",
    "policy/approx_kl",
    "policy/clip_frac",
    "policy/entropy",
    "rollout/response_tokens_mean",
    "rollout/logprob_gap_mean",
    "rollout/tokens_per_s",
    "perf/mfu_rollout",
    "perf/mfu_train",
    "policy/nll",
    "dpo/accuracy",
    "reward_model/accuracy",
    "cost_model/accuracy",
    "train/grad_norm",
    "train/lr",
)


class Display(Protocol):
    """What the command shows while a run goes."""

    def stage(self, name: str) -> None:
        """A part of the run begins."""

    def iteration(self, iteration: int, total: int, metrics: dict[str, float]) -> None:
        """One more iteration is committed; metrics: those of its rollout and training, what was not measured left out."""


_DISPLAYS: list[Display] = []
_TOLD: dict[RunRef, tuple[float, UUID | None]] = {}  # when Prefect and MLflow were last told, and the progress artifact


def set_display(display: Display | None) -> None:
    """Show every iteration on this display from now on; None = show nothing."""
    _DISPLAYS[:] = [display] if display else []


def progress(ref: RunRef, iteration: int) -> None:
    """Tell the display about a committed iteration and, every few seconds, Prefect and MLflow about all so far."""
    run = opened(ref)
    total = run.config.iterations
    made_before = current(ref)["iterations_before"]
    for display in _DISPLAYS:
        if iteration > made_before:
            display.iteration(iteration, total, iteration_metrics(run, iteration))
        elif iteration == made_before:
            display.stage(f"iterations 1 to {made_before} were made before")
    if ref not in _TOLD:
        _TOLD[ref] = (time.monotonic(), _show(ref, iteration))
    elif time.monotonic() - _TOLD[ref][0] > _EVERY_S or iteration == total:
        track(ref)
        _TOLD[ref] = (time.monotonic(), _show(ref, iteration))


def _show(ref: RunRef, iteration: int) -> UUID | None:
    """Bring the run's page up to date; returns its progress artifact, None = there is none yet.

    A server that is away, restarting for instance, delays what it shows and stops no run.
    """
    run, shown = opened(ref), _TOLD[ref][1] if ref in _TOLD else None
    share = 100.0 * iteration / run.config.iterations
    try:
        if shown is None:
            shown = _start_progress(ref, share)
        else:
            update_progress_artifact(shown, share)
        _show_table(ref, range(max(1, iteration + 1 - _ROWS), iteration + 1))
    except httpx.HTTPError as error:
        log.warning("Prefect shows the progress of this run later: %s: %s", type(error).__name__, error)
    return shown


def final_report(ref: RunRef) -> dict[str, Any]:
    """End a finished run: artifacts, MLflow, run.json and report.json. Returns the result of the command.

    Raises StoreError unless every planned iteration is committed.
    """
    _TOLD.pop(ref, None)
    gate = opened(ref).store.committed("gate")
    assert gate is not None
    verdict = verdict_of(ref, gate).verdict
    result = summarise(ref, "completed" if verdict == "promote" else "rejected")
    planned, done = result["iterations_planned"], result["iterations_done"]
    if planned != done:
        raise StoreError(
            f"The run planned {planned} iterations, and {done} are committed.",
            path=result["run_dir"],
            remedy="Resume the run.",
        )
    write_json(opened(ref).store.folder, RESULT_FILE, result)
    _show_table(ref, range(1, planned + 1))
    create_markdown_artifact(
        markdown=_markdown(result), key=_key(ref, "report"), description=f"Report of {ref.run_key}"
    )
    track(ref)
    finish(ref, result["status"], tags={"verdict": verdict, "weights_sha256": str(result["weights_sha256"])})
    return result


def summarise(ref: RunRef, status: str) -> dict[str, Any]:
    """The result so far, from what is committed; what does not exist yet is None. Also serves runs that failed."""
    run = opened(ref)
    attempt = current(ref)
    done = done_of(run)
    last = run.store.committed(step_path("train", done)) if done else None
    gate, registration = _facts(run, "gate"), _facts(run, "registration")
    return {
        "status": status,
        "run_key": ref.run_key,
        "run_dir": str(run.store.folder),
        "iterations_planned": run.config.iterations,
        "iterations_done": done,
        "iterations_reused": attempt["iterations_before"],
        "seconds": round(time.time() - attempt["began"], 3),
        "weights_sha256": run.store.manifest(last).facts.get("sha256") if last else None,
        "metrics": iteration_metrics(run, done),
        "evaluation": evaluation_summary(run),
        "gate": {name: gate[name] for name in ("verdict", "reasons")} if gate else None,
        "model": {name: registration[name] for name in ("name", "version", "aliases")} if registration else None,
    }


def iteration_metrics(run: Run, iteration: int) -> dict[str, float]:
    """Metrics of an iteration's rollout and training, without those that were not measured."""
    manifests = [_manifest(run, step_path(kind, iteration)) for kind in ("rollout", "train")]
    values = {name: value for manifest in manifests if manifest for name, value in manifest.metrics.items()}
    return {name: value for name, value in values.items() if value is not None}


def evaluation_report(ref: RunRef) -> dict[str, Any]:
    """End a finished evaluation: run.json, report.json and a table for operators. Returns the result of the command."""
    run = opened(ref)
    result = {
        "status": "completed",
        "run_key": ref.run_key,
        "run_dir": str(run.store.folder),
        "model": run.config.model.source,
        "seconds": round(time.time() - current(ref)["began"], 3),
        "evaluation": evaluation_summary(run),
    }
    write_json(run.store.folder, RESULT_FILE, result)
    table = [{"suite": name, **report} for name, report in result["evaluation"].items()]
    create_table_artifact(
        table=table, key=_key(ref, "evaluation"), description=f"Evaluation of {run.config.model.source}"
    )
    finish(ref, "completed")
    return result


def evaluation_summary(run: Run) -> dict[str, Any]:
    """Suite -> the newest report of the run, with the start checkpoint's score as baseline_score_mean."""
    reports = {
        iteration: manifest.facts["suites"]
        for iteration in range(run.config.iterations + 1)
        if (manifest := _manifest(run, step_path("evaluation", iteration)))
    }
    if not reports:
        return {}
    start = reports.get(0, {})
    newest = max(reports)
    return {
        name: {**report, "iteration": newest, **_baseline(start.get(name, {}))}
        for name, report in reports[newest].items()
    }


def _baseline(start: dict[str, Any]) -> dict[str, Any]:
    """What a suite's report repeats of the start checkpoint's."""
    components = {"baseline_components": start["components"]} if "components" in start else {}
    return {"baseline_score_mean": start.get("score_mean"), **components}


def failure_artifact(flow_run_id: UUID, run_key: str, cause: str, command: str) -> None:
    """Show operators of a flow run, from any process, why it ended and how to continue it."""
    text = (
        f"## {run_key} did not finish\n\n{cause}\n\nContinue from the last committed step:\n\n```bash\n{command}\n```\n"
    )
    artifact = ArtifactCreate(
        type="markdown",
        key=f"{_slug(run_key)}-failure",
        description=f"Failure of {run_key}",
        data=text,
        flow_run_id=flow_run_id,
    )
    with get_client(sync_client=True) as client:
        client.create_artifact(artifact)


def _start_progress(ref: RunRef, share: float) -> UUID:
    made = create_progress_artifact(share, key=_key(ref, "progress"), description=f"Iterations of {ref.run_key}")
    assert isinstance(made, UUID)
    return made


def _show_table(ref: RunRef, iterations: range) -> None:
    create_table_artifact(
        table=_table(opened(ref), iterations), key=_key(ref, "iterations"), description=f"Iterations of {ref.run_key}"
    )


def _table(run: Run, iterations: range) -> list[dict[str, Any]]:
    rows = []
    for iteration in iterations:
        if metrics := iteration_metrics(run, iteration):
            rows.append({"iteration": iteration, **{name: metrics[name] for name in _COLUMNS if name in metrics}})
    return rows


def _markdown(result: dict[str, Any]) -> str:
    lines = [f"## {result['run_key']}: {result['status']}", ""]
    lines += [
        f"* {result['iterations_done']} iterations, {result['iterations_reused']} of them made by earlier attempts"
    ]
    lines += [f"* {result['seconds']:.1f} s in this attempt, weights `{result['weights_sha256']}`", ""]
    lines += ["| suite | start checkpoint | final policy | rows |", "|---|---|---|---|"]
    for name, report in result["evaluation"].items():
        lines.append(f"| {name} | {report['baseline_score_mean']} | {report['score_mean']} | {report['rows']} |")
    lines += ["", f"**Gate: {result['gate']['verdict']}**", ""]
    lines += [f"* {reason}" for reason in result["gate"]["reasons"]]
    if model := result["model"]:
        lines += ["", f"Registered as `models:/{model['name']}/{model['version']}` ({', '.join(model['aliases'])})"]
    return "\n".join(lines) + "\n"


def _facts(run: Run, path: str) -> dict[str, Any] | None:
    manifest = _manifest(run, path)
    return manifest.facts if manifest else None


def _manifest(run: Run, path: str) -> Manifest | None:
    ref: StepRef | None = run.store.committed(path)
    return run.store.manifest(ref) if ref else None


def _key(ref: RunRef, what: str) -> str:
    return f"{_slug(ref.run_key)}-{what}"


def _slug(run_key: str) -> str:
    """Prefect takes lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", run_key.lower()).strip("-")
