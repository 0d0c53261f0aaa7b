"""What is shown: one line per iteration where nobody can see a bar, no number that was not measured."""

import io
import math
import subprocess
import sys

import pytest

from engine import display as display_module
from engine.display import Display, TerminalDisplay, describe, duration
from engine.metrics import Metric, Metrics

METRICS = {
    "reward/score_mean": 0.25,
    "policy/approx_kl": 0.001,
    "rollout/response_tokens_mean": 12.34,
    "rollout/tokens_per_s": 1234.5,
    "train/lr": 1e-5,
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(display_module.time, "monotonic", lambda: now[0])
    return now


def test_one_line_per_iteration_with_the_time_left(clock: list[float]):
    stream = io.StringIO()
    display = Display(stream)
    for iteration in range(3, 6):  # the first two were made by an earlier attempt
        display.iteration(iteration, 5, METRICS)
        clock[0] += 30.0
    display.finish()
    first, second, third = stream.getvalue().splitlines()
    assert first == "iteration 3/5  reward 0.250  kl 0.0010  length 12.3  1,234 tokens/s"
    assert second.endswith("tokens/s  30 s left")
    assert third.startswith("iteration 5/5") and "left" not in third


@pytest.mark.parametrize(("steps", "lines"), [(1, 1), (3, 3), (10, 10), (15, 10), (1000, 10)])
def test_a_stage_of_many_steps_gets_about_ten_lines_and_always_its_last(steps: int, lines: int):
    stream = io.StringIO()
    display = Display(stream)
    for step in range(1, steps + 1):
        display.step("sft", step, steps, Metrics({"policy/nll": Metric(2.0)}))
    shown = stream.getvalue().splitlines()
    assert len(shown) == lines and shown[-1] == f"sft {steps}/{steps}  loss 2.0000"


def test_what_was_not_measured_is_not_shown():
    assert describe({}) == ""
    assert describe({"reward/score_mean": math.nan, "policy/approx_kl": 0.5}) == "kl 0.5000"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 s"), (89.0, "89 s"), (90.0, "2 min"), (3000.0, "50 min"), (9000.0, "2.5 h")]
)
def test_times_have_the_unit_that_fits(seconds: float, text: str):
    assert duration(seconds) == text


def test_a_terminal_gets_a_bar_with_the_same_numbers():
    stream = io.StringIO()
    display = TerminalDisplay(stream)
    display.stage("run x")
    display.step("sft", 1, 2, Metrics())
    display.iteration(1, 2, METRICS)
    display.finish()
    shown = stream.getvalue()
    assert "run x" in shown and "sft" in shown and "reward 0.250" in shown and "iterations" in shown


def test_the_bar_is_not_loaded_where_it_is_not_shown():
    code = "import sys; from engine.display import make_display; make_display().stage('x'); sys.exit('rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "x\n")
