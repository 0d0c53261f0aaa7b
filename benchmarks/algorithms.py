"""Table of every algorithm: error against its float64 reference, mean score of the toy task before and after, seconds.

    python -m benchmarks.algorithms

writes the table of docs/algorithms.md anew, with today's date. The task is that of tests/e2e/test_learning.py.
"""

import datetime
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.offline_session import OfflineSession
from tests.helpers.learning import learn_toy, toy_config, toy_scorers
from tests.helpers.offline import offline_run
from tests.helpers.tiny import tiny_folder
from tests.parity.algorithm_errors import ADVANTAGES, float32_error
from tests.parity.objective_errors import LOSSES, objective_error

PAGE = Path(__file__).parents[1] / "docs" / "algorithms.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
HEAD = ["algorithm", "error in float32", "start score", "end score", "start cost", "end cost", "seconds"]
COST_LIMIT = 0.1
STEPS = 30  # of an objective on fixed rows


def rows(source: Path) -> Iterator[list[str]]:
    """One row of the table per algorithm, as it is measured."""
    with toy_scorers(source) as scorers:
        for name in ADVANTAGES:
            constraint: dict[str, Any] = {"cost_limit": COST_LIMIT} if name.startswith("safe") else {}
            train = {"mini_batches": 1 if name == "opo" else 2}
            outcome = learn_toy(toy_config(source, {"name": name, **constraint}, train=train), source, scorers)
            costs = [f"{outcome.start_cost:.2f}", f"{outcome.end_cost:.2f}"] if constraint else ["", ""]
            figures = [f"{float32_error(name):.0e}", f"{outcome.start:.2f}", f"{outcome.end:.2f}", *costs]
            yield [f"`{name}`", *figures, f"{outcome.seconds:.1f}"]


def objective_rows(root: Path) -> Iterator[list[str]]:
    """One row per objective on fixed rows: its held-out figure at the start and after STEPS optimiser steps."""
    for name in LOSSES:
        began = time.perf_counter()
        options = {"train": {"lr": 3e-3}, "steps": STEPS, "checkpoint": {"every": STEPS}}
        run, data = offline_run(root, name, name, **options)
        session = OfflineSession(run)
        start = session.start(data)
        reports = [session.evaluate(0, start), session.evaluate(STEPS, session.train(STEPS, start))]
        scores = [run.store.manifest(report).facts["suites"]["held_out"]["score_mean"] for report in reports]
        session.close()
        figures = [f"{objective_error(name):.0e}", *(f"{score:.2f}" for score in scores), "", ""]
        yield [f"`{name}`", *figures, f"{time.perf_counter() - began:.1f}"]


def main() -> None:
    """Measure, show and write."""
    lines = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    with tempfile.TemporaryDirectory() as folder:
        for row in (*rows(tiny_folder(Path(folder) / "model")), *objective_rows(Path(folder) / "fixed")):
            lines.append(f"| {' | '.join(row)} |")
            print(lines[-1], flush=True)
    lines.append(f"\nMeasured on {datetime.date.today().isoformat()}, limit of the mean cost {COST_LIMIT}.")
    page = PAGE.read_text()
    table = "\n".join((BEGIN, "", *lines, "", END))
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: table, page, flags=re.DOTALL))


if __name__ == "__main__":
    main()
