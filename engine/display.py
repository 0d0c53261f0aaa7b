"""What a person sees while a run goes: a bar on a terminal, one line per iteration elsewhere; always standard error."""

import sys
import time
from typing import TYPE_CHECKING, TextIO

from engine.metrics import Metrics

if TYPE_CHECKING:
    from rich.progress import TaskID

_SHOWN = {  # metric -> how it is written
    "reward/score_mean": "reward {:.3f}",
    "policy/approx_kl": "kl {:.4f}",
    "rollout/response_tokens_mean": "length {:.1f}",
    "rollout/tokens_per_s": "{:,.0f} tokens/s",
    "policy/nll": "loss {:.4f}",
    "dpo/accuracy": "accuracy {:.3f}",
    "reward_model/accuracy": "accuracy {:.3f}",
    "cost_model/accuracy": "accuracy {:.3f}",
    "cost_model/sign_accuracy": "signs {:.3f}",
}
_PARTS = 10  # lines that a stage with many steps gets


class Display:
    """Plain lines, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._first: tuple[int, float] | None = None  # iteration and time that the remaining time is counted from

    def stage(self, name: str) -> None:
        """A part of the run begins."""
        self._write(name)

    def step(self, stage: str, step: int, steps: int, metrics: Metrics) -> None:
        """One step inside a stage, for instance of supervised fine-tuning; about ten of them are shown."""
        if step == steps or step * _PARTS // steps > (step - 1) * _PARTS // steps:
            self._write(f"{stage} {step}/{steps}  {describe(metrics.values())}")

    def iteration(self, iteration: int, total: int, metrics: dict[str, float]) -> None:
        """One more iteration is committed."""
        self._write(f"iteration {iteration}/{total}  {describe(metrics)}{self._left(iteration, total)}")

    def finish(self) -> None:
        """Nothing more comes."""

    def _left(self, iteration: int, total: int) -> str:
        if self._first is None:
            self._first = (iteration, time.monotonic())
            return ""
        first, since = self._first
        seconds = (time.monotonic() - since) / max(iteration - first, 1) * (total - iteration)
        return f"  {duration(seconds)} left" if iteration < total else ""

    def _write(self, line: str) -> None:
        print(line.rstrip(), file=self._stream, flush=True)


class TerminalDisplay(Display):
    """A bar that is drawn again in place."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        super().__init__(stream)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[now]}"))
        self._progress: Progress = Progress(*columns, console=Console(file=stream))
        self._bars: dict[str, TaskID] = {}
        self._progress.start()

    def stage(self, name: str) -> None:
        """A part of the run begins."""
        self._progress.print(name)

    def step(self, stage: str, step: int, steps: int, metrics: Metrics) -> None:
        """One step inside a stage."""
        self._draw(stage, step, steps, describe(metrics.values()))

    def iteration(self, iteration: int, total: int, metrics: dict[str, float]) -> None:
        """One more iteration is committed."""
        self._draw("iterations", iteration, total, f"{describe(metrics)}{self._left(iteration, total)}")

    def finish(self) -> None:
        """Leave the bar as it is."""
        self._progress.stop()

    def _draw(self, name: str, done: int, total: int, now: str) -> None:
        if name not in self._bars:
            self._bars[name] = self._progress.add_task(name, total=total, now="")
        self._progress.update(self._bars[name], completed=done, now=now)


def make_display() -> Display:
    """The display that fits standard error."""
    return TerminalDisplay(sys.stderr) if sys.stderr.isatty() else Display(sys.stderr)


def describe(metrics: dict[str, float]) -> str:
    """The few numbers worth a glance, in one line; what was not measured is left out."""
    return "  ".join(
        text.format(metrics[name])
        for name, text in _SHOWN.items()
        if name in metrics and metrics[name] == metrics[name]
    )


def duration(seconds: float) -> str:
    """A time in the unit that fits it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
