"""Scorer processes: killed when stuck, replaced when dead, gone when closed or orphaned. Nothing is simulated here."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import pytest

from engine.reward.isolation import IsolatedScorer
from engine.reward.scorer import Sample, Score, Unscored
from engine.reward.verifiers import function_verifier
from tests.unit.reward.functions import STUCK
from tests.unit.reward.processes import scorer_pids, wait_until, wait_until_gone

ROWS = 8


def isolated(
    function: str, *, timeout_s: float = 60.0, workers: int = 1, memory_bytes: int | None = None
) -> IsolatedScorer:
    factory = partial(function_verifier, f"tests.unit.reward.{function}")
    return IsolatedScorer(function, factory, timeout_s=timeout_s, workers=workers, memory_bytes=memory_bytes)


def rows(count: int = ROWS, **extra: Any) -> list[Sample]:
    return [Sample("p", "r" * row, extra={"row": row, **extra}, index=row) for row in range(count)]


def causes(scores: list[Score]) -> list[str]:
    """Per sample: its score as text, or the cause for which it has none."""
    return [one.cause if isinstance(one, Unscored) else f"{one:g}" for one in scores]


@contextmanager
def new_scorers() -> Iterator[Callable[[], set[int]]]:
    """The scorer processes that were not there before; none of them may be left at the end."""
    before = scorer_pids()
    yield lambda: scorer_pids() - before
    assert scorer_pids() - before == set()


def test_the_order_is_kept_whichever_process_scores() -> None:
    with new_scorers(), closing(isolated("functions:length", workers=2)) as scorer:
        assert scorer.score(rows(40)) == [float(row) for row in range(40)]
        assert scorer.score([]) == []


def test_one_process_serves_all_steps() -> None:
    with closing(isolated("functions:process_id")) as scorer:
        scores = scorer.score(rows()) + scorer.score(rows())
        assert set(scores) == {float(pid) for pid in scorer_pids()}
        assert float(os.getpid()) not in scores


@pytest.mark.timeout(120)
@pytest.mark.parametrize("function", ["loops", "blocks_in_c", "ignores_sigterm"])
def test_a_stuck_sample_is_killed_and_its_process_replaced(function: str) -> None:
    """Three steps in a row: seven of eight scored each time, never fewer processes, none left at the end."""
    with new_scorers() as running, closing(isolated(f"functions:{function}", timeout_s=1.5, workers=2)) as scorer:
        for _ in range(3):
            assert causes(scorer.score(rows())) == ["1"] * STUCK + ["timeout"] + ["1"] * (ROWS - STUCK - 1)
            wait_until(lambda: len(running()) == 2)


def test_a_sample_that_ends_its_process_is_lost_alone() -> None:
    with new_scorers() as running, closing(isolated("functions:exits_on_three")) as scorer:
        for _ in range(2):
            result = scorer.score(rows())
            assert causes(result) == ["1", "1", "1", "lost", "1", "1", "1", "1"]
            assert isinstance(result[3], Unscored)
            assert "exit code 9" in result[3].reason
            wait_until(lambda: len(running()) == 1)


def test_exceptions_that_do_not_travel_cost_one_sample_each() -> None:
    """Neither an exception that does not unpickle, nor sys.exit, nor a KeyboardInterrupt takes the process down."""
    with closing(isolated("functions:raises_unusually")) as scorer:
        result = scorer.score(rows(5))
        assert causes(result) == ["1", "error", "error", "error", "1"]
        assert isinstance(result[1], Unscored)
        assert "does not unpickle" in result[1].reason


def test_a_killed_idle_process_does_not_end_the_run() -> None:
    with new_scorers() as running, closing(isolated("functions:length")) as scorer:
        assert causes(scorer.score(rows(2))) == ["0", "1"]
        killed = running()
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        wait_until_gone(killed)
        wait_until(lambda: _scores_again(scorer))


def _scores_again(scorer: IsolatedScorer) -> bool:
    return causes(scorer.score(rows(2))) == ["0", "1"]


@pytest.mark.parametrize(
    ("function", "found"),
    [
        ("absent:score", "No module named"),
        ("functions:absent", "has no attribute 'absent'"),
        ("import_fails:score", "licence server not reachable"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_the_reason_of_every_sample(function: str, found: str) -> None:
    with closing(isolated(function)) as scorer:
        result = scorer.score(rows(2))
        assert causes(result) == ["start", "start"]
        assert isinstance(result[0], Unscored)
        assert found in result[0].reason


def test_memory_is_bounded_and_the_process_survives() -> None:
    with closing(isolated("functions:takes_memory", memory_bytes=64 * 2**20)) as scorer:
        result = scorer.score([*rows(1, bytes=2**20), *rows(1, bytes=2**30), *rows(1, bytes=2**20)])
        assert causes(result) == ["1", "error", "1"]
        assert isinstance(result[1], Unscored)
        assert "MemoryError" in result[1].reason


def test_processes_outlive_the_thread_that_started_them() -> None:
    with closing(isolated("functions:process_id")) as scorer:
        found: list[Score] = []
        thread = threading.Thread(target=lambda: found.extend(scorer.score(rows(1))))
        thread.start()
        thread.join()
        assert scorer.score(rows(1)) == found


def test_threads_may_score_at_the_same_time() -> None:
    with closing(isolated("functions:length", workers=2)) as scorer:
        found: list[list[Score]] = []
        threads = [threading.Thread(target=lambda: found.append(scorer.score(rows(20)))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [[float(row) for row in range(20)]] * 3


def test_closing_kills_a_busy_process() -> None:
    with new_scorers() as running:
        scorer = isolated("functions:blocks_in_c", timeout_s=600.0)
        found: list[Score] = []
        thread = threading.Thread(target=lambda: found.extend(scorer.score(rows()[STUCK:])))
        thread.start()
        wait_until(lambda: len(running()) == 1)
        scorer.close()
        thread.join(timeout=30.0)
        assert not thread.is_alive()
        assert causes(found) == ["lost"] * (ROWS - STUCK)


@pytest.mark.parametrize(
    ("function", "end"), [("ignores_sigterm", "exit"), ("ignores_sigterm", "kill"), ("blocks_in_c", "kill")]
)
def test_no_scorer_outlives_its_parent(function: str, end: str) -> None:
    """The parent leaves without closing, or is killed outright, while a scorer is stuck."""
    command = [sys.executable, "-m", "tests.unit.reward.abandoned", function]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        if end == "kill":
            parent.kill()
        parent.stdin.close()
        parent.wait(timeout=30)
    wait_until_gone(pids)
