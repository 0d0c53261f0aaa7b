"""A run may be continued on another number of ranks: the optimiser's state is gathered, every row is learned from once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.experience import load_experience
from engine.session import Session
from engine.store import step_path
from tests.helpers.runs import tiny_run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
TOLERANCE = 1e-6


def trained(root: Path, key: str, iterations: list[int], ranks: int, sessions: list[Session]) -> dict[str, Any]:
    """A run continued by these iterations on so many ranks; its last weights, optimiser state and the rows it has used."""
    train = {"backend": "deepspeed", "zero_stage": 2, "lr": 1e-4}
    run, data = tiny_run(root, key, train=train, placement={"mode": "colocate", "ranks": ranks})
    sessions.append(session := Session(run))
    step = session.start(data)
    for iteration in iterations:
        step = session.train(iteration, session.rollout(iteration, step))
    session.close()
    folder, rows = run.store.read(step), []
    for iteration in iterations:
        rollout = run.store.committed(step_path("rollout", iteration))
        assert rollout is not None
        rows += load_experience(run.store.read(rollout)).column("prompt")
    return {
        "weights": load_file(folder / "policy" / "model.safetensors"),
        "optimiser": load_file(folder / "policy_optimizer.safetensors"),
        "rows": rows,
    }


@pytest.mark.usefixtures("on_cluster")
@pytest.mark.parametrize(("before", "after"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.exhaustive)])
def test_it_ends_as_if_it_had_not_been_moved(tmp_path: Path, sessions: list[Session], before: int, after: int) -> None:
    whole = trained(tmp_path, "whole", [1, 2], before, sessions)
    trained(tmp_path, "moved", [1], before, sessions)
    moved = trained(tmp_path, "moved", [1, 2], after, sessions)
    assert moved["rows"] == whole["rows"]
    for part in ("weights", "optimiser"):
        assert moved[part].keys() == whole[part].keys()
        for name, expected in whole[part].items():
            torch.testing.assert_close(moved[part][name], expected, rtol=TOLERANCE, atol=TOLERANCE, msg=name)
