"""A store damaged at random is continued to the weights of an undamaged run, or refused by name; never anything else."""

import random
import shutil
from pathlib import Path

import pytest

from engine.backends.weights import load_folder, weights_sha256
from engine.errors import ConfigError, HybridFlowError, StoreError
from engine.runs import Run, open_run
from engine.session import Session
from tests.chaos.damage import damage
from tests.helpers.runs import tiny_run

pytestmark = pytest.mark.timeout(900)
ITERATIONS = 2
CASES = 300
IN_SHORT = 100  # the others are marked exhaustive
AT_A_TIME = 50


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, str]:
    """A finished run, and the sha256 of its weights; damaged are copies of it."""
    run, _ = tiny_run(tmp_path_factory.mktemp("finished"), "run", iterations=ITERATIONS)
    weights = completed(run)
    run.store.lease.release()
    return run, weights


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[pytest.mark.exhaustive] if first >= IN_SHORT else [])
        for first in range(0, CASES, AT_A_TIME)
    ],
)
def test_a_damaged_store_never_gives_other_weights(finished: tuple[Run, str], tmp_path: Path, first: int) -> None:
    whole, weights = finished
    refused = 0
    for seed in range(first, first + AT_A_TIME):
        draw, folder = random.Random(seed), tmp_path / str(seed)
        shutil.copytree(whole.store.folder, folder)
        done = [damage(folder, draw) for _ in range(draw.choice((1, 1, 2, 3)))]
        ending = resumed(tmp_path, str(seed))
        refused += was_refused(ending, weights, f"seed {seed}, {done}")
        shutil.rmtree(folder)
    assert refused < AT_A_TIME / 2  # most damage heals


def resumed(root: Path | str, run_key: str) -> str | HybridFlowError:
    """Weights of the run, continued up to three times as its errors say; or the error that stays."""
    ending: str | HybridFlowError = ""
    for _ in range(3):
        try:
            run = open_run(str(root), run_key)
        except HybridFlowError as error:
            return error
        run.store.lease.acquire()
        try:
            return completed(run)
        except HybridFlowError as error:
            ending = error
        finally:
            run.store.lease.release()
    return ending


def completed(run: Run) -> str:
    """sha256 of the final weights as they lie in the store, with every missing step made again."""
    data = run.store.committed("data")
    if data is None:
        raise StoreError("The data has to be prepared again.", path=str(run.store.folder / "data"), remedy="Resume.")
    session = Session(run)
    try:
        step = session.start(data)
        for iteration in range(1, ITERATIONS + 1):
            step = session.train(iteration, session.rollout(iteration, step))
    finally:
        session.close()
    return weights_sha256(load_folder(run.store.read(step) / "policy"))


def was_refused(ending: str | HybridFlowError, weights: str, case: str) -> bool:
    """Whether a run was refused, saying which file or option and what to do; one that went on must have these weights."""
    if isinstance(ending, HybridFlowError):
        options = isinstance(ending, ConfigError) and ending.problems
        assert options or (ending.where.get("path") and ending.remedy), f"{case}: {ending!r}"
        return True
    assert ending == weights, case
    return False
