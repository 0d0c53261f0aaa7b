"""Gradients summed over data ranks while the backward pass still runs, in few large messages."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Size, Tensor, nn

from engine.backends.ranks import Axis

BUCKET = 6_250_000  # gradient elements of one message (25 MB); a larger tensor has one of its own

Part = Callable[[nn.Parameter], Tensor]  # this rank's part of a parameter's gradient, float32; zeros where it has none


class GradientBuckets:
    """Sums over the ranks of an axis, begun as the last backward pass of a step finishes one parameter after the other.

    Buckets hold the parameters from last to first, about the order in which their gradients get ready, and leave in
    that order on every rank, because ranks must agree on it. What no backward pass finishes (a parameter that no row
    used, all of them on a rank without rows) leaves with `summed`.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], shapes: Mapping[str, Size], part: Part, axis: Axis
    ) -> None:
        """shapes: of this rank's parts."""
        self._parameters = dict(parameters)
        self._shapes = dict(shapes)
        self._part = part
        self._axis = axis
        self._buckets = in_buckets({name: shapes[name].numel() for name in reversed(self._parameters)})
        self._bucket_of = {name: number for number, names in enumerate(self._buckets) for name in names}
        self._unfinished: list[set[str]] = []  # of every bucket, while the last backward pass runs
        self._messages: list[tuple[Tensor, Any]] = []  # sum and handle of every bucket that has left
        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(self._finished, name))

    def open(self) -> None:
        """The next backward pass is this rank's last of the step: what it finishes may leave."""
        self._unfinished = [set(names) for names in self._buckets]

    def summed(self) -> dict[str, Tensor]:
        """Every gradient summed over the ranks, by name, as views of the messages; the parameters' own are taken away."""
        self._unfinished = []
        while len(self._messages) < len(self._buckets):
            self._send_next()
        sums: dict[str, Tensor] = {}
        for names, (flat, work) in zip(self._buckets, self._messages, strict=True):
            work.wait()
            pieces = flat.split([self._shapes[name].numel() for name in names])
            sums |= {name: piece.view(self._shapes[name]) for name, piece in zip(names, pieces, strict=True)}
        self._messages = []
        return {name: sums[name] for name in self._parameters}

    def _finished(self, name: str, _parameter: Tensor) -> None:
        if not self._unfinished:
            return
        self._unfinished[self._bucket_of[name]].discard(name)
        while len(self._messages) < len(self._buckets) and not self._unfinished[len(self._messages)]:
            self._send_next()

    def _send_next(self) -> None:
        parts = []
        for name in self._buckets[len(self._messages)]:
            parts.append(self._part(self._parameters[name]).reshape(-1))
            self._parameters[name].grad = None
        flat = torch.cat(parts)
        self._messages.append((flat, dist.all_reduce(flat, group=self._axis.group, async_op=True)))


def in_buckets(sizes: Mapping[str, int]) -> list[list[str]]:
    """Names in their order, in groups of at most BUCKET elements; a larger one is alone."""
    groups: list[list[str]] = []
    filled = BUCKET
    for name, size in sizes.items():
        if filled + size > BUCKET:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups
