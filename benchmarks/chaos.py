"""Kills at random: seconds until a run trains again after the death of each of its processes, and samples lost.

`python -m benchmarks.chaos` disturbs one run for every seed, compares each with an undisturbed one (weights, optimiser, samples,
metrics; to the bit) and writes its table into benchmarks/README.md; `--seeds 3 4` adds the rows of these seeds to those there.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from tests.chaos.harness import VICTIMS, Blow, Chaos
from tests.helpers.command import SMOKE, result_of
from tests.helpers.outcomes import outcome

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- kills: begin -->", "<!-- kills: end -->"
HEAD = "| seed | victim | iteration | seconds after a step | continued by | seconds to the next training step | samples lost |"
OPTIONS = ("registry=null", "iterations=40", "evaluation.every=20")
SAMPLES = 32  # of an iteration


def main() -> None:
    """Disturb one run per seed and write what it cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--kills", type=int, default=len(VICTIMS), help="in every run")
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            write(seed, measured(Path(folder), seed, arguments.kills))


def measured(folder: Path, seed: int, kills: int) -> list[Blow]:
    """Blows of one disturbed run. Raises RuntimeError if it ended in any way unlike the undisturbed one."""
    settings = [part for option in OPTIONS for part in ("--set", option)]
    result_of("run", str(SMOKE), "--run-key", "whole", *settings, cwd=folder)
    blows = Chaos(folder, "chaos", OPTIONS, seed).suffer(kills)
    if outcome(folder / "runs", "chaos") != outcome(folder / "runs", "whole"):
        raise RuntimeError(f"The run of seed {seed} differs from the undisturbed one: {blows}")
    return blows


def write(seed: int, blows: list[Blow]) -> None:
    """Put the rows of a seed into the table of the README, in place of those that it had."""
    before, _, rest = README.read_text().partition(BEGIN)
    old, _, after = rest.partition(END)
    kept = [line for line in old.splitlines() if line.startswith("| ") and line[2].isdigit()]
    rows = [line for line in kept if not line.startswith(f"| {seed} |")] + [row(seed, blow) for blow in blows]
    rows.sort(key=lambda line: int(line.split("|")[1]))
    lines = [
        BEGIN,
        f"Last measured {time.strftime('%Y-%m-%d')}. {summary(rows)}",
        "",
        HEAD,
        "|---" * 7 + "|",
        *rows,
        END,
    ]
    README.write_text(before + "\n".join(lines) + after)


def row(seed: int, blow: Blow) -> str:
    """One kill as a line of the table."""
    how = "resume" if blow.resumed else "itself"
    cells = [
        seed,
        blow.victim,
        blow.iteration,
        f"{blow.moment_s:.1f}",
        how,
        f"{blow.recovery_s:.1f}",
        blow.lost * SAMPLES,
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def summary(rows: list[str]) -> str:
    """Median and maximum for every kind of victim."""
    seconds: dict[str, list[float]] = {}
    for line in rows:
        cells = [cell.strip() for cell in line.split("|")]
        seconds.setdefault(cells[2], []).append(float(cells[6]))
    parts = [
        f"{victim} {statistics.median(values):.0f} s (at most {max(values):.0f})"
        for victim, values in sorted(seconds.items())
    ]
    return f"{len(rows)} kills; median until the next training step: {', '.join(parts)}."


if __name__ == "__main__":
    main()
