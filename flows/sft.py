"""A language model from fixed rows, by supervised fine-tuning or DPO: data, optimiser steps, evaluation, gate, registry."""

from typing import Any

from prefect import flow

from engine.offlineconfig import LANGUAGE_MODELS
from tasks.attempts import working_on
from tasks.failure import note_cancellation, note_crash, note_failure
from tasks.gate import gate_policy
from tasks.offline_data import prepare_rows
from tasks.offline_steps import evaluate_model, measured_after, start_model, stretches, train_steps
from tasks.refs import opened
from tasks.registry import champion_obstacle, register_policy
from tasks.report import final_report, progress
from tasks.requests import begin_offline_run


@flow(name="sft", on_failure=[note_failure], on_crashed=[note_crash], on_cancellation=[note_cancellation])
def sft(
    config: str | dict[str, Any] | None = None,
    overrides: list[str] | None = None,
    run_key: str | None = None,
    root: str | None = None,
) -> dict[str, Any]:
    """Make a run with objective sft or dpo, or continue that of a key, to a registered model; returns its result.

    Parameters as those of the flow `rlhf`.
    """
    run = begin_offline_run(LANGUAGE_MODELS)
    with working_on(run):
        options = opened(run).config
        data = prepare_rows(run)
        model = start_model(run, data)
        baseline = evaluate_model(run, 0, model)
        for step in stretches(run):
            model = train_steps(run, step, model)
            if measured_after(options, step):
                evaluation = evaluate_model(run, step, model)
            progress(run, step)
        gate = gate_policy(run, evaluation, baseline, champion_obstacle(options))
        if options.registry is not None:
            register_policy(run, gate, model, evaluation)
        return final_report(run)
