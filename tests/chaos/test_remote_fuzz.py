"""Storage damaged at random under a machine with an empty cache: the run ends with the same weights, or is refused by name."""

import random
import shutil
from pathlib import Path

import pytest

from engine.runs import create_run
from tests.chaos.damage import damage
from tests.chaos.test_store_fuzz import ITERATIONS, completed, resumed, was_refused
from tests.helpers.runs import prepared, tiny_config
from tests.helpers.tiny import tiny_folder

pytestmark = pytest.mark.timeout(900)
CASES = 40


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where a finished run lies behind its URL, and the sha256 of its weights; damaged are copies of it."""
    place = tmp_path_factory.mktemp("finished")
    source = tiny_folder(place / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYBRIDFLOW_CACHE", str(place / "cache"))
        config = tiny_config(place, source, iterations=ITERATIONS).model_copy(update={"root": f"file://{place}/runs"})
        run = create_run(config, "run", source, {"data": "fixed"})
        prepared(run)
        weights = completed(run)
        run.store.lease.release()
    return place / "runs" / "run", weights


def test_damaged_storage_never_gives_other_weights(
    finished: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, weights = finished
    refused = 0
    for seed in range(CASES):
        draw, root = random.Random(seed), tmp_path / str(seed)
        monkeypatch.setenv("HYBRIDFLOW_CACHE", str(root / "cache"))
        shutil.copytree(whole, root / "runs" / "run")
        done = [damage(root / "runs" / "run", draw) for _ in range(draw.choice((1, 1, 2, 3)))]
        ending = resumed(f"file://{root}/runs", "run")
        refused += was_refused(ending, weights, f"seed {seed}, {done}")
        shutil.rmtree(root)
    assert refused < CASES / 2  # most damage heals
