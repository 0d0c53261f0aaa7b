"""Transfer protocols: what every rank is sent, and that collecting undoes spreading for every batch and group size."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Batch
from engine.controller.dispatch import DP, DP_TO_FIRST, ONE_TO_ALL, ONE_TO_FIRST, data_parallel_rows, dispatch, prepare
from engine.errors import ShapeError
from engine.metrics import Metric, Metrics

pytestmark = pytest.mark.unit


def batch_of(size: int, mini_batches: int = 0) -> Batch:
    fields = {"group_ids": torch.arange(size)}
    if mini_batches:
        fields["mini_batch"] = torch.arange(size) % mini_batches
    return Batch(fields, {"prompt": [f"p{i}" for i in range(size)]})


@settings(max_examples=80, deadline=None)
@given(size=st.integers(0, 17), ranks=st.integers(1, 6), mini_batches=st.integers(0, 4))
def test_collecting_undoes_spreading(size: int, ranks: int, mini_batches: int) -> None:
    batch = batch_of(size, mini_batches)
    parts = [arguments[0] for arguments in DP.spread((batch,), ranks)]
    assert sum(len(part) for part in parts) == size
    together = DP.collect((batch,), parts)
    assert together.group_ids.tolist() == list(range(size))
    assert together.column("prompt") == batch.column("prompt")


@settings(max_examples=80, deadline=None)
@given(size=st.integers(1, 40), ranks=st.integers(1, 6), mini_batches=st.integers(1, 4))
def test_every_rank_gets_its_share_of_every_mini_batch(size: int, ranks: int, mini_batches: int) -> None:
    batch = batch_of(size, mini_batches)
    shares = data_parallel_rows(batch, ranks)
    assert sorted(torch.cat(shares).tolist()) == list(range(size))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_plain_arguments_go_to_every_rank() -> None:
    spread = DP.spread((batch_of(3), "same"), 2)
    assert [arguments[1] for arguments in spread] == ["same", "same"]
    assert ONE_TO_ALL.spread(("x",), 3) == [("x",)] * 3


def test_results_come_back_by_protocol() -> None:
    assert ONE_TO_ALL.collect((), [1, 2]) == [1, 2]
    assert ONE_TO_FIRST.collect((), [1, 2]) == 1
    assert DP_TO_FIRST.collect((batch_of(2),), ["combined", None]) == "combined"
    merged = DP.collect((), [Metrics({"a/b": Metric(1.0, "mean", 1)}), Metrics({"a/b": Metric(4.0, "mean", 2)})])
    assert merged["a/b"] == pytest.approx(3.0)


def test_a_method_is_sent_only_what_it_reads() -> None:
    @dispatch(DP, reads=("group_ids",))
    def method(self: object, batch: Batch) -> None: ...

    (sent,) = prepare(method, (batch_of(2, 1),))
    assert sorted(sent.fields) == ["group_ids"]
    assert sent.columns == {}
    with pytest.raises(ShapeError, match="group_ids"):
        prepare(method, (Batch({"scores": torch.zeros(2)}),))
