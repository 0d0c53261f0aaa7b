"""Gradients that leave in buckets during the backward pass are the sums that one process with all rows finds."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.backends import buckets
from engine.backends.buckets import GradientBuckets, in_buckets
from engine.backends.layout import gradient_part
from engine.backends.ranks import Axis
from tests.helpers.processes import Ranks

WIDTH = 6
ROWS = [[[0, 1], [2]], [[3, 4, 5]], [], [[6, 7]]]  # of every micro-batch of every rank


class Net(nn.Module):
    """Three layers, the last tied to the first; one parameter serves no row and one only rows of even number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(3))
        self.some = nn.Parameter(torch.ones(WIDTH))
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: list[int]) -> Tensor:
        inputs = torch.stack([torch.randn(WIDTH, generator=torch.Generator().manual_seed(row)) for row in rows])
        hidden = self.second(torch.tanh(self.first(inputs)))
        if rows[0] % 2 == 0:
            hidden = hidden * self.some
        return nn.functional.linear(torch.tanh(hidden), self.first.weight).square().sum()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    group = Ranks(4, tmp_path_factory.mktemp("ranks") / "rendezvous")
    yield group
    group.close()


def case(rank: int, world_size: int, bucket: int) -> dict[str, Any]:
    """Two steps of the same rows; what had left when the backward pass ended, and all that left, in elements."""
    all_reduce, sent = dist.all_reduce, []

    def counted(tensor: Tensor, **options: Any) -> Any:
        sent.append(tensor.numel())
        return all_reduce(tensor, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "BUCKET", bucket)
        patch.setattr(dist, "all_reduce", counted)
        net = Net()
        named = dict(net.named_parameters())
        axis = Axis(world_size, rank, dist.group.WORLD, torch.device("cpu"))
        sums = GradientBuckets(named, {name: p.shape for name, p in named.items()}, gradient_part, axis)
        first = one_step(net, sums, ROWS[rank])
        sent.clear()
        one_step(net, sums, ROWS[rank][:0])  # a step without rows anywhere in between
        sent.clear()
        backward(net, sums, ROWS[rank])
        during = list(sent)
        second = summed(net, sums)
    return {"sums": [first, second], "during": during, "sent": sent}


def backward(net: Net, sums: GradientBuckets, parts: list[list[int]]) -> None:
    for number, rows in enumerate(parts, 1):
        if number == len(parts):
            sums.open()
        net(rows).backward()


def summed(net: Net, sums: GradientBuckets) -> dict[str, Tensor]:
    found = sums.summed()
    assert all(parameter.grad is None for parameter in net.parameters())
    return {name: tensor.clone() for name, tensor in found.items()}


def one_step(net: Net, sums: GradientBuckets, parts: list[list[int]]) -> dict[str, Tensor]:
    backward(net, sums, parts)
    return summed(net, sums)


@pytest.mark.parametrize("bucket", [1, 50, 1000])
def test_sums_in_buckets_equal_one_backward_pass_over_all_rows(bucket: int, four: Ranks) -> None:
    """Unequal micro-batches, a rank without rows, a tied and an unused parameter; one bucket per tensor, a few, or one."""
    whole = Net()
    for rank in ROWS:
        for rows in rank:
            whole(rows).backward()
    for result in four.run(case, bucket):
        for sums in result["sums"]:
            assert list(sums) == [name for name, _ in whole.named_parameters()]
            for name, parameter in whole.named_parameters():
                wanted = torch.zeros(3) if parameter.grad is None else parameter.grad
                torch.testing.assert_close(sums[name], wanted, rtol=1e-5, atol=1e-6)


def test_messages_leave_while_the_backward_pass_runs_and_in_one_order(four: Ranks) -> None:
    """A rank that waits for a gradient that never comes sends the rest afterwards; the rank without rows sends all then."""
    results = four.run(case, 1)
    assert len({tuple(result["sent"]) for result in results}) == 1
    during = [result["during"] for result in results]
    assert during[0] and not during[2] and all(len(count) < len(results[0]["sent"]) for count in during)


def test_buckets_keep_the_order_and_give_a_large_tensor_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET", 10)
    assert in_buckets({"a": 4, "b": 6, "c": 1, "d": 30, "e": 2}) == [["a", "b"], ["c"], ["d"], ["e"]]
