"""The whole pipeline: data, start checkpoint, iterations of rollout and training, evaluation, gate, registry."""

from typing import Any

from prefect import flow

from tasks.attempts import working_on
from tasks.data import prepare_data
from tasks.evaluate import evaluate_policy, evaluation_due
from tasks.failure import note_cancellation, note_crash, note_failure
from tasks.gate import gate_policy
from tasks.refs import opened
from tasks.registered import Registered, nothing_to_do
from tasks.registry import champion_obstacle, register_policy
from tasks.report import final_report, progress
from tasks.requests import begin_unless_registered
from tasks.rollout import rollout_iteration
from tasks.train import start_checkpoint, train_iteration


@flow(name="rlhf", on_failure=[note_failure], on_crashed=[note_crash], on_cancellation=[note_cancellation])
def rlhf(
    config: str | dict[str, Any] | None = None,
    overrides: list[str] | None = None,
    run_key: str | None = None,
    root: str | None = None,
    skip_if_registered: bool = False,
    cancel_earlier: bool = False,
) -> dict[str, Any]:
    """Make a run from a configuration, or continue the run of a key, to a registered model; returns its result.

    config: path of a YAML file or its content, None = as recorded under `run_key`; overrides: `section.option=value`;
    root: folder of runs, None = the configuration's; skip_if_registered: do nothing where a run with the same options, data
    and base model has registered its model; cancel_earlier: end unfinished flow runs of the same deployment first.
    """
    run = begin_unless_registered()
    if isinstance(run, Registered):
        return nothing_to_do(run)
    with working_on(run):
        options = opened(run).config
        data = prepare_data(run)
        policy = start_checkpoint(run, data)
        baseline = evaluate_policy(run, 0, policy)
        for iteration in range(1, options.iterations + 1):
            experience = rollout_iteration(run, iteration, policy)
            policy = train_iteration(run, iteration, experience)
            if evaluation_due(options, iteration):
                evaluation = evaluate_policy(run, iteration, policy)
            progress(run, iteration)
        gate = gate_policy(run, evaluation, baseline, champion_obstacle(options))
        if options.registry is not None:
            register_policy(run, gate, policy, evaluation)
        return final_report(run)
