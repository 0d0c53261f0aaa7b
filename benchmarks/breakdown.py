"""Where the time of a run went and how its score rose, from the manifests of a finished run.

Usage: python benchmarks/breakdown.py RUN_KEY [--root runs]
Prints two Markdown tables: medians of every phase over the iterations, and the score curve.
"""

import argparse
import statistics

from engine.runs import open_run
from engine.store import Manifest, Store, step_path


def manifests(store: Store, kind: str, iterations: int) -> dict[int, Manifest]:
    """Iteration -> manifest of the committed steps of a kind; evaluations may start at 0."""
    found = {}
    for iteration in range(iterations + 1):
        if ref := store.committed(step_path(kind, iteration)):
            found[iteration] = store.manifest(ref)
    return found


def phases(*kinds: dict[int, Manifest]) -> dict[str, list[float]]:
    """time/* of every iteration by name."""
    seconds: dict[str, list[float]] = {}
    steps = [manifest for kind in kinds for manifest in kind.values()]
    for name, value in [entry for manifest in steps for entry in manifest.metrics.items()]:
        if name.startswith("time/") and value is not None:
            seconds.setdefault(name.removeprefix("time/").removesuffix("_s"), []).append(value)
    return seconds


def print_phases(rollouts: dict[int, Manifest], trained: dict[int, Manifest]) -> None:
    """Median seconds and share of every phase, and the median time from one commit to the next."""
    commits = [trained[i].committed_at - trained[i - 1].committed_at for i in trained if i - 1 in trained]
    whole = statistics.median(commits)
    print(f"Median iteration: {whole:.2f} s over {len(commits)} iterations (evaluations included)\n")
    print("| phase | median s | share |\n|---|---|---|")
    medians = {name: statistics.median(values) for name, values in phases(rollouts, trained).items()}
    for name, seconds in sorted(medians.items(), key=lambda item: -item[1]):
        print(f"| {name} | {seconds:.3f} | {seconds / whole:.0%} |")
    rest = whole - sum(medians.values())
    print(f"| everything else (controller, commits, flow) | {rest:.3f} | {rest / whole:.0%} |\n")


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
    iterations = run.config.iterations
    rollouts = manifests(run.store, "rollout", iterations)
    trained = manifests(run.store, "train", iterations)
    print_phases(rollouts, trained)
    print_curve(trained, manifests(run.store, "evaluation", iterations), run.config.gate.suite)


if __name__ == "__main__":
    main()
