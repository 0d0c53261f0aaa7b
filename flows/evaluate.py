"""Evaluation of any model on the suites of a configuration; trains and registers nothing."""

from typing import Any

from prefect import flow

from tasks.attempts import working_on
from tasks.data import prepare_data
from tasks.evaluate import evaluate_policy
from tasks.failure import note_cancellation, note_crash, note_failure
from tasks.report import evaluation_report
from tasks.requests import begin_run
from tasks.train import start_checkpoint


@flow(name="evaluate", on_failure=[note_failure], on_crashed=[note_crash], on_cancellation=[note_cancellation])
def evaluate(
    config: str | dict[str, Any],
    source: str,
    overrides: list[str] | None = None,
    run_key: str | None = None,
    root: str | None = None,
) -> dict[str, Any]:
    """Greedy answers of a model on every suite, as a run of its own; returns its result.

    config: path of a YAML file or its content; source: local folder, Hub id, models:/NAME@ALIAS, runs:KEY or a .gguf file.
    """
    run = begin_run()
    with working_on(run):
        data = prepare_data(run)
        policy = start_checkpoint(run, data)
        evaluate_policy(run, 0, policy)
        return evaluation_report(run)
