"""Whatever is killed, a run ends with the weights, metrics and samples of one that was never disturbed."""

from pathlib import Path

import pytest

from engine.backends.weight_sync import exchange_folder
from tests.chaos.harness import Chaos
from tests.helpers.clusters import processes_of
from tests.helpers.command import SMOKE, result_of
from tests.helpers.outcomes import outcome

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]
OPTIONS = ("registry=null", "iterations=24", "evaluation.every=12")


def test_a_run_whose_processes_are_killed_at_random_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    settings = [part for option in OPTIONS for part in ("--set", option)]
    whole = result_of("run", str(SMOKE), "--run-key", "whole", *settings, cwd=tmp_path)
    blows = Chaos(tmp_path, "chaos", OPTIONS, seed=1).suffer(4, ("driver", "worker", "raylet", "prefect"))
    print(*blows, sep="\n")
    assert len(blows) == 4, blows
    assert not [blow for blow in blows if blow.lost], blows
    assert not [blow for blow in blows if blow.resumed and blow.victim in ("worker", "prefect")], blows
    assert processes_of("chaos") == []
    assert not list(exchange_folder("chaos").glob("*"))
    expected = outcome(tmp_path / "runs", "whole")
    assert len(expected) > 2 * whole["iterations_planned"]
    assert outcome(tmp_path / "runs", "chaos") == expected
