"""Where the time of a run went and how its score rose, from the manifests of a finished run.

Usage: python benchmarks/breakdown.py RUN_KEY [--root runs]
Prints Markdown tables: medians of every phase over the iterations, what the rest of the time was spent on, the score curve.
"""

import argparse
import statistics
from dataclasses import dataclass

from engine.runs import open_run
from engine.store import Manifest, Store, step_path


def manifests(store: Store, kind: str, iterations: int) -> dict[int, Manifest]:
    """Iteration -> manifest of the committed steps of a kind; evaluations may start at 0."""
    found = {}
    for iteration in range(iterations + 1):
        if ref := store.committed(step_path(kind, iteration)):
            found[iteration] = store.manifest(ref)
    return found


@dataclass(frozen=True)
class Iteration:
    """One iteration between the commit before it (of an evaluation, if there was one) and its last; seconds."""

    wall: float
    work: float  # at least one role worked: generation, scoring, forward, backward, optimiser, hand-over
    phases: dict[str, float]  # of every role's methods; those that overlap add up to more than `work`
    overhead: dict[str, float]  # the rest of `wall`, by what it was spent on


def seconds_of(manifest: Manifest, name: str) -> float:
    """One of the step's timers, 0 where it did not run."""
    return manifest.metrics.get(f"time/{name}_s") or 0.0


def iteration(before: Manifest, rollout: Manifest, train: Manifest) -> Iteration:
    """Where the time between two commits went.

    A step's time/step_s begins with the step and ends when its metrics are written; its files are then sealed and its
    manifest is dated. Whatever is left between two dates lies outside of both: the task, what the run tells, pruning.
    """
    steps = (rollout, train)
    phases = {
        name.removeprefix("time/").removesuffix("_s"): value
        for step in steps
        for name, value in step.metrics.items()
        if name.startswith("time/") and value is not None
    }
    busy, inside = (sum(seconds_of(step, name) for step in steps) for name in ("busy", "step"))
    saving = sum(value for name, value in phases.items() if name.endswith("_save"))
    sealing = rollout.sealed_s + train.sealed_s
    wall = train.committed_at - before.committed_at
    overhead = {
        "writing weights and optimiser (policy_save, critic_save)": saving,
        "controller inside the steps: its own maths, calls, prompts, experience": inside - busy,
        "hashing files and bringing them to disk": sealing,
        "between the steps: tasks, display, pruning, the rename of a commit": wall - inside - sealing,
    }
    work = busy - saving
    return Iteration(wall, work, {name: phases[name] for name in phases if name not in ("busy", "step")}, overhead)


def iterations(store: Store, count: int) -> list[Iteration]:
    """Every iteration whose steps were all made in one go: after a failure the time between commits means nothing."""
    rollouts, trained = manifests(store, "rollout", count), manifests(store, "train", count)
    evaluated, found = manifests(store, "evaluation", count), []
    for number in range(1, count + 1):
        before = evaluated.get(number - 1) or trained.get(number - 1)
        if before and number in rollouts and number in trained and "time/step_s" in trained[number].metrics:
            found.append(iteration(before, rollouts[number], trained[number]))
    return found


def print_phases(found: list[Iteration]) -> None:
    """Medians of every phase over the iterations in which it ran, then means of what is not work of a role."""
    whole = statistics.median(one.wall for one in found)
    print(f"Median iteration: {whole:.3f} s over {len(found)} iterations (evaluations left out)\n")
    print("| phase | median s | share |\n|---|---|---|")
    names = {name for one in found for name in one.phases}
    medians = {name: statistics.median(one.phases[name] for one in found if name in one.phases) for name in names}
    for name, seconds in sorted(medians.items(), key=lambda item: -item[1]):
        print(f"| {name} | {seconds:.3f} | {seconds / whole:.0%} |")
    wall = statistics.mean(one.wall for one in found)
    print(
        "\n| outside of generation, scoring, forward, backward, optimiser and hand-over | mean s | share |\n|---|---|---|"
    )
    for name in found[0].overhead:
        seconds = statistics.mean(one.overhead[name] for one in found)
        print(f"| {name} | {seconds:.3f} | {seconds / wall:.1%} |")
    total = [one.wall - one.work for one in found]
    mean, median = statistics.mean(total), statistics.median(total)
    print(f"| all of it (median {median:.3f}) | {mean:.3f} | {mean / wall:.1%} |\n")


def print_curve(trained: dict[int, Manifest], evaluated: dict[int, Manifest], suite: str) -> None:
    """Mean training score, length and evaluation score by iteration."""
    print("| iteration | training score | response tokens | held-out score |\n|---|---|---|---|")
    for iteration in sorted(trained.keys() | evaluated.keys()):
        metrics = trained[iteration].metrics if iteration in trained else {}
        cells = [metrics.get("reward/score_mean"), metrics.get("rollout/response_tokens_mean")]
        if iteration in evaluated:
            cells.append(evaluated[iteration].facts["suites"][suite]["score_mean"])
        shown = [f"{cell:.3f}" if cell is not None else "" for cell in [*cells, None][:3]]
        print(f"| {iteration} | {' | '.join(shown)} |")


def main() -> None:
    """Print the tables of one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_key")
    parser.add_argument("--root", default="runs")
    arguments = parser.parse_args()
    run = open_run(arguments.root, arguments.run_key)
    count = run.config.iterations
    print_phases(iterations(run.store, count))
    print_curve(manifests(run.store, "train", count), manifests(run.store, "evaluation", count), run.config.gate.suite)


if __name__ == "__main__":
    main()
