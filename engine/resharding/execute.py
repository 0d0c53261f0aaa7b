"""The transition on real tensors: one rank's memory, its collectives, and what they really cost.

Any torch.distributed backend; the device is that of the tensors.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from engine.errors import HybridFlowError, ShapeError
from engine.resharding.layout import Group, Piece, Shard
from engine.resharding.plan import Plan, RankPlan, Step, Strategy

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class TrainingShard:
    """What a rank trains, laid out so that nothing has to be packed before it is sent.

    buffers: flat uint8, one per step of the plan; tensors: the parameters by name, views into the buffers. Train on
    the views: writing to them is all it takes for the next transition to send the new values.
    """

    buffers: tuple[Tensor, ...]
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class GenerationShard:
    """What a rank generates with: for every parameter its pieces, in the order of the divided dimension.

    After a "grouped" transition one piece of each is the training shard itself, so training changes it. Dropping
    this object frees whatever training does not use.
    """

    pieces: dict[str, tuple[Tensor, ...]]
    dimensions: dict[str, int]

    def tensor(self, name: str) -> Tensor:
        """A parameter in one piece: a new tensor where it has several, made only now so that few exist twice."""
        pieces = self.pieces[name]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.dimensions[name])


@dataclass(frozen=True)
class Transition:
    """What one transition cost one rank in bytes; the fields mean what they mean in `plan.Cost`, but are measured.

    received: tensors that came from other ranks. peak: storages for generation that were alive at once, each counted
    once. kept: storages behind the generation shard. redundant: training storages that are none of those.
    """

    strategy: Strategy
    rank: int
    received: int
    peak: int
    kept: int
    redundant: int


class ProcessGroups:
    """The process groups of one process by their ranks; each is made once and serves every plan that needs it."""

    def __init__(self) -> None:
        self._groups: dict[Group, dist.ProcessGroup] = {}

    def open(self, plan: Plan) -> None:
        """Make the plan's groups that are missing. Every rank has to call it, with the same plans in the same order.

        Raises HybridFlowError if this process has no process group, or one of another size than the plan.
        """
        if not dist.is_initialized() or dist.get_world_size() != plan.training.size:
            found = f"has {dist.get_world_size()}" if dist.is_initialized() else "has not been made"
            raise HybridFlowError(
                f"a transition was planned for {plan.training.size} ranks; the process group {found}.",
                remedy="Join a group of that size on every rank first.",
            )
        for ranks in plan.groups():
            if ranks not in self._groups:
                self._groups[ranks] = dist.new_group(list(ranks))

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, ranks: Group) -> dist.ProcessGroup:
        return self._groups[ranks]


class Resharder:
    """The transition of one plan in this process; every rank makes one and calls it at the same time."""

    def __init__(self, plan: Plan, groups: ProcessGroups) -> None:
        groups.open(plan)
        self.plan = plan.ranks[dist.get_rank()]
        self._strategy = plan.strategy
        self._groups = groups
        self._memory = _Memory()

    def to_generation(self, training: TrainingShard) -> tuple[GenerationShard, Transition]:
        """This rank's generation shard, and what it cost to make.

        training: from `lay_out` with this plan; it is never written to. Drop the generation shard of the last
        transition first: what is left of it counts for the peak.
        """
        self._memory.restart()
        steps = self.plan.steps
        gathered = [self._gather(step, own) for step, own in zip(steps, training.buffers, strict=True)]
        buffers = [
            (step.gather.shards[place], arrived[place])
            for step, (arrived, _) in zip(steps, gathered, strict=True)
            for place in step.keep
        ]
        kept = _storages([buffer for _, buffer in buffers])
        apart = _storages(training.buffers).items() - kept.items()
        transition = Transition(
            strategy=self._strategy,
            rank=self.plan.rank,
            received=sum(received for _, received in gathered),
            peak=self._memory.peak,
            kept=sum(kept.values()),
            redundant=sum(size for _, size in apart),
        )
        return _generation_shard(buffers), transition

    def _gather(self, step: Step, own: Tensor) -> tuple[list[Tensor], int]:
        """(shards of the group's members, bytes that came from other ranks), complete before the next step starts.

        An all-gather as one broadcast per member: torch.distributed.all_gather stages all shards in a second buffer
        (gloo and NCCL alike), which would double the peak, and all_gather_into_tensor wants shards of equal size side
        by side, so the training shard would have to move.
        """
        group, buffers, works, received = step.gather.group, [], [], 0
        for place, (source, size) in enumerate(zip(group, step.gather.sizes, strict=True)):
            buffer = self._buffer(own, size, place == step.own)
            buffers.append(buffer)
            if len(group) > 1 and size > 0:
                works.append(dist.broadcast(buffer, source, self._groups[group], async_op=True))
                received += 0 if place == step.own else buffer.nbytes
        for work in works:
            work.wait()
        return buffers, received

    def _buffer(self, own: Tensor, size: int, is_own: bool) -> Tensor:
        """Memory in which a member's shard is gathered."""
        if not is_own:
            buffer = torch.empty(size, dtype=torch.uint8, device=own.device)
        else:
            buffer = own if self.plan.in_place else own.clone()
        self._memory.track(buffer)
        return buffer


def lay_out(plan: RankPlan, tensors: Mapping[str, Tensor]) -> TrainingShard:
    """Copy a rank's training parameters into the memory from which the plan sends them; train on the result.

    tensors: exactly the parameters of `plan.holds`, by name, in the planned shape and dtype, all on one device.
    Raises ShapeError, with everything that does not fit.
    """
    _require_planned(plan, tensors)
    device = next(iter(tensors.values())).device
    buffers, views = [], {}
    for step in plan.steps:
        shard = step.gather.shards[step.own]
        buffer = torch.empty(step.gather.sizes[step.own], dtype=torch.uint8, device=device)
        for piece, view in _views(buffer, shard):
            views[piece.parameter.name] = view.copy_(tensors[piece.parameter.name].detach())
        buffers.append(buffer)
    return TrainingShard(tuple(buffers), views)


class _Memory:
    """Bytes of the storages it was shown, for as long as anything refers to them, and their largest sum."""

    def __init__(self) -> None:
        self._sizes: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def restart(self) -> None:
        """Forget the peak, but not what is still alive."""
        self.peak = self._alive()

    def track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._sizes[StorageWeakRef(storage)] = storage.nbytes()
        self.peak = max(self.peak, self._alive())

    def _alive(self) -> int:
        self._sizes = {storage: size for storage, size in self._sizes.items() if not storage.expired()}
        return sum(self._sizes.values())


def _generation_shard(buffers: Sequence[tuple[Shard, Tensor]]) -> GenerationShard:
    found: dict[str, list[tuple[Piece, Tensor]]] = {}
    for shard, buffer in buffers:
        for piece, view in _views(buffer, shard):
            found.setdefault(piece.parameter.name, []).append((piece, view))
    ordered = {name: sorted(pieces, key=lambda entry: entry[0].start) for name, pieces in found.items()}
    return GenerationShard(
        pieces={name: tuple(view for _, view in pieces) for name, pieces in ordered.items()},
        dimensions={name: pieces[0][0].parameter.dimension or 0 for name, pieces in ordered.items()},
    )


def _views(buffer: Tensor, shard: Shard) -> Iterator[tuple[Piece, Tensor]]:
    """The pieces of a shard in its flat buffer; wide elements first, so that all are aligned without gaps."""
    start = 0
    for piece in sorted(shard, key=lambda piece: -piece.parameter.item_bytes):
        stop = start + piece.nbytes
        yield piece, buffer[start:stop].view(DTYPES[piece.parameter.dtype]).view(piece.shape)
        start = stop


def _storages(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Address -> bytes of the memory behind tensors."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _require_planned(plan: RankPlan, tensors: Mapping[str, Tensor]) -> None:
    planned = {piece.parameter.name: piece for piece in plan.holds}
    wrong = [f"{name} is missing" for name in sorted(planned.keys() - tensors.keys())]
    wrong += [f"{name} is not planned here" for name in sorted(tensors.keys() - planned.keys())]
    for name in sorted(planned.keys() & tensors.keys()):
        tensor, piece = tensors[name], planned[name]
        wanted = (piece.shape, DTYPES[piece.parameter.dtype])
        if (tuple(tensor.shape), tensor.dtype) != wanted:
            wrong.append(f"{name} is {list(tensor.shape)} {tensor.dtype}, planned {list(wanted[0])} {wanted[1]}")
    if len(devices := {str(tensor.device) for tensor in tensors.values()}) > 1:
        wrong.append(f"the tensors lie on {', '.join(sorted(devices))}")
    if wrong:
        raise ShapeError(
            f"the training shard does not fit the plan: {'; '.join(wrong)}.",
            remedy="Pass what the plan says this rank holds (RankPlan.holds).",
            rank=plan.rank,
        )
