"""The in-process group: calls, pending results, errors that name role and method."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from engine.batch import Batch
from engine.config import RunConfig
from engine.controller.dispatch import DP, ONE_TO_ALL, dispatch
from engine.controller.local_group import LocalGroup
from engine.controller.worker import Worker, WorkerContext
from engine.errors import DivergedError, WorkerError

pytestmark = pytest.mark.unit


class Doubler(Worker):
    @dispatch(DP, reads=("scores",))
    def double(self, batch: Batch) -> Batch:
        return Batch({"costs": batch.scores * 2})

    @dispatch(ONE_TO_ALL)
    def fail(self) -> None:
        raise ZeroDivisionError("by design")

    @dispatch(ONE_TO_ALL)
    def diverge(self) -> None:
        raise DivergedError("not finite")


@pytest.fixture
def group() -> LocalGroup:
    config = cast(RunConfig, SimpleNamespace())
    return LocalGroup(Doubler, WorkerContext("doubler", 0, 1, config, Path()))


def test_a_pending_result_merges_into_a_batch_and_into_the_next_call(group: LocalGroup) -> None:
    batch = Batch({"scores": torch.tensor([1.0, 2.0])})
    pending = group.submit(Doubler.double, batch)
    assert batch.merge(pending).costs.tolist() == [2.0, 4.0]
    assert pending.result() is pending.result()
    assert set(group.take_seconds()) == {"doubler.double"}
    assert group.take_seconds() == {}


def test_an_unexpected_exception_names_role_method_and_keeps_the_traceback(group: LocalGroup) -> None:
    with pytest.raises(WorkerError, match="fail raised ZeroDivisionError: by design") as caught:
        group.call(Doubler.fail)
    assert caught.value.where == {"role": "doubler", "rank": 0}
    assert "Traceback" in caught.value.remedy


def test_errors_of_ours_keep_their_class(group: LocalGroup) -> None:
    with pytest.raises(DivergedError) as caught:
        group.call(Doubler.diverge)
    where: dict[str, Any] = caught.value.where
    assert where == {"role": "doubler", "rank": 0}
