"""The weight transition between gloo processes: every bit arrives, and costs what the plan and the paper say."""

import ctypes
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from engine.errors import HybridFlowError, ShapeError
from engine.resharding.execute import DTYPES, ProcessGroups, Resharder, Transition, lay_out
from engine.resharding.layout import Generation, GenerationGroups, Layout, Parameter
from engine.resharding.plan import STRATEGIES, RankPlan, formula, plan_transition
from tests.helpers.processes import Ranks

LAYERS = 4
SIZES = (1, 2, 4)
TCP_INFO_BYTES_RECEIVED = 128  # offset of tcpi_bytes_received, u64, in struct tcp_info of linux/tcp.h
Case = tuple[Layout, Generation, str]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Ranks]]:
    """The processes of a world size, started when it is first asked for."""
    started: dict[int, Ranks] = {}

    def of_size(world_size: int) -> Ranks:
        if world_size not in started:
            rendezvous = tmp_path_factory.mktemp("ranks") / "rendezvous"
            started[world_size] = Ranks(world_size, rendezvous)
        return started[world_size]

    yield of_size
    for group in started.values():
        group.close()


def all_layouts(world_size: int) -> list[tuple[Layout, Generation]]:
    """Every layout of so many ranks with every generation layout that fits."""
    layouts = [Layout(p, t, d) for p, t, d in product(SIZES, SIZES, SIZES) if p * t * d == world_size]
    return [
        (training, Generation(p_g, t_g))
        for training in layouts
        for p_g, t_g in product(SIZES, SIZES)
        if training.pipeline % p_g == training.tensor % t_g == 0
    ]


LAYOUTS = {
    2: all_layouts(2),
    4: all_layouts(4),
    8: [
        (Layout(1, 4, 2), Generation(1, 2)),  # the example of the paper
        (Layout(1, 8, 1), Generation(1, 2)),
        (Layout(2, 2, 2), Generation(1, 1)),
        (Layout(2, 4, 1), Generation(1, 2)),
        (Layout(2, 4, 1), Generation(2, 2)),
        (Layout(4, 2, 1), Generation(2, 1)),
        (Layout(4, 1, 2), Generation(1, 1)),
        (Layout(1, 1, 8), Generation(1, 1)),
    ],
}


def all_cases(world_size: int) -> list[Case]:
    """The layouts of a world size with every strategy."""
    return [(*layout, strategy) for layout in LAYOUTS[world_size] for strategy in STRATEGIES]


def even_model() -> list[Parameter]:
    """Layers alike, all parameters divided: what the closed forms are about."""
    up = [Parameter(f"{layer}.up", (16, 3), "bfloat16", layer, dimension=0) for layer in range(LAYERS)]
    return up + [Parameter(f"{layer}.down", (3, 8), "float32", layer, dimension=1) for layer in range(LAYERS)]


def ragged_model() -> list[Parameter]:
    """Embedding, head, replicated norms and scalars, one, two and four bytes per element in turn."""
    norms = [Parameter(f"{layer}.norm", (5,), "float32", layer, dimension=None) for layer in range(LAYERS)]
    bytes_ = [
        Parameter(f"{layer}.scale", (3, 8, 1), "float8_e4m3fn", layer, dimension=1) for layer in range(0, LAYERS, 2)
    ]
    ends = [
        Parameter("embed", (24, 3), "float32", 0, dimension=0),
        Parameter("head", (24, 3), "bfloat16", LAYERS - 1, dimension=0),
        Parameter("temperature", (), "float16", 3, dimension=None),
    ]
    return [*bytes_, *norms, *even_model(), *ends]


def full_tensors(parameters: list[Parameter], seed: int) -> dict[str, Tensor]:
    """The whole model, random, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return {p.name: torch.randn(p.shape, generator=generator).to(DTYPES[p.dtype]) for p in parameters}


def slice_of(full: Tensor, parameter: Parameter, parts: int, part: int) -> Tensor:
    return full if parameter.dimension is None else full.chunk(parts, parameter.dimension)[part]


def held_in_training(rank: int, case: Case, parameters: list[Parameter], full: dict[str, Tensor]) -> dict[str, Tensor]:
    """Cut from the whole model with torch.chunk, not with the planner."""
    training, _, strategy = case
    place = training.coordinates(rank)
    if strategy == "gather":
        return {p.name: slice_of(full[p.name], p, training.size, rank) for p in parameters}
    per_stage = LAYERS // training.pipeline
    mine = [p for p in parameters if p.layer // per_stage == place.pipeline]
    return {p.name: slice_of(full[p.name], p, training.tensor, place.tensor) for p in mine}


def needed_in_generation(
    rank: int, case: Case, parameters: list[Parameter], full: dict[str, Tensor]
) -> dict[str, Tensor]:
    training, generation, strategy = case
    method = "grouped" if strategy == "grouped" else "vanilla"
    place = GenerationGroups(training, generation, method).coordinates(rank)
    per_stage = LAYERS // generation.pipeline
    mine = [p for p in parameters if p.layer // per_stage == place.pipeline]
    return {p.name: slice_of(full[p.name], p, generation.tensor, place.tensor) for p in mine}


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def differences(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not the same bit for bit, or are in one set only."""
    missing = found.keys() ^ wanted.keys()
    same_name = found.keys() & wanted.keys()
    kinds = {name for name in same_name if found[name].shape != wanted[name].shape}
    return sorted(missing | kinds | {name for name in same_name if bits(found[name]) != bits(wanted[name])})


def transitions(rank: int, world_size: int, cases: list[Case], parameters: list[Parameter]) -> list[Any]:
    """(planned, measured, names that came out wrong) of every case on this rank."""
    groups, results = ProcessGroups(), []
    for seed, case in enumerate(cases):
        plan = plan_transition(*case, parameters)
        full = full_tensors(parameters, seed)
        training = lay_out(plan.ranks[rank], held_in_training(rank, case, parameters, full))
        generation, measured = Resharder(plan, groups).to_generation(training)
        found = {name: generation.tensor(name) for name in generation.pieces}
        wrong = differences(found, needed_in_generation(rank, case, parameters, full))
        wrong += differences(training.tensors, held_in_training(rank, case, parameters, full))
        results.append((plan.ranks[rank], measured, wrong))
    return results


def assert_as_planned(planned: RankPlan, measured: Transition, wrong: list[str], case: Case) -> None:
    cost = planned.total
    assert wrong == [], case
    assert (measured.strategy, measured.rank) == (case[2], planned.rank)
    found = (measured.received, measured.peak, measured.redundant, measured.kept)
    assert found == (cost.received, cost.peak, cost.redundant, cost.kept), case


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_every_bit_arrives_and_the_cost_is_that_of_the_paper(world_size: int, ranks: Callable[[int], Ranks]) -> None:
    """All layouts; equal stages and divided parameters, so the closed forms hold on every rank."""
    cases, parameters = all_cases(world_size), even_model()
    model = sum(tensor.nbytes for tensor in full_tensors(parameters, 0).values())
    for results in ranks(world_size).run(transitions, cases, parameters):
        for case, (planned, measured, wrong) in zip(cases, results, strict=True):
            training, generation, strategy = case
            assert_as_planned(planned, measured, wrong, case)
            shares = formula(strategy, training, generation)
            found = (measured.received, measured.peak, measured.redundant)
            assert found == tuple(share * model for share in (shares.received, shares.peak, shares.redundant)), case
            assert measured.kept * generation.pipeline * generation.tensor == model


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_a_ragged_model_arrives_and_costs_what_was_planned(world_size: int, ranks: Callable[[int], Ranks]) -> None:
    """Stages of different size, replicated parameters, elements of one, two and four bytes."""
    cases = all_cases(world_size)
    for results in ranks(world_size).run(transitions, cases, ragged_model()):
        for case, result in zip(cases, results, strict=True):
            assert_as_planned(*result, case)


def wire_bytes() -> int:
    """Bytes that the kernel has delivered on this process's open TCP connections."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        if not entry.is_socket():
            continue
        with socket.socket(fileno=os.dup(int(entry.name))) as copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6):
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                total += struct.unpack_from("Q", info, TCP_INFO_BYTES_RECEIVED)[0]
    return total


def resident_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (most since the last reset) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def as_the_kernel_saw_it(rank: int, world_size: int, cases: list[Case], parameters: list[Parameter]) -> list[Any]:
    """(planned, bytes on the wire, growth of resident memory at its peak, and what stays) of every case on this rank."""
    groups, results = ProcessGroups(), []
    for case in cases:
        plan = plan_transition(*case, parameters)
        resharder = Resharder(plan, groups)
        full = full_tensors(parameters, 0)
        training = lay_out(plan.ranks[rank], held_in_training(rank, case, parameters, full))
        torch.distributed.barrier()
        ctypes.CDLL(None).malloc_trim(0)  # so that new tensors need new memory
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        wire, resident = wire_bytes(), resident_bytes("VmRSS")
        generation, _ = resharder.to_generation(training)
        torch.distributed.barrier()
        ctypes.CDLL(None).malloc_trim(0)
        stays = resident_bytes("VmRSS") - resident
        results.append((plan.ranks[rank], wire_bytes() - wire, resident_bytes("VmHWM") - resident, stays))
        del generation
    return results


def test_the_kernel_counts_the_same_bytes(ranks: Callable[[int], Ranks]) -> None:
    """16 MB over TCP and in resident memory: nothing is sent twice, staged, copied or kept beside what is counted."""
    cases = [
        (training, Generation(1, 2), strategy)
        for training in (Layout(pipeline=1, tensor=4), Layout(pipeline=2, tensor=2))
        for strategy in STRATEGIES
    ]
    parameters = [Parameter(f"{layer}.w", (1024, 512), "float32", layer, dimension=0) for layer in range(LAYERS)]
    for results in ranks(4).run(as_the_kernel_saw_it, cases, parameters):
        for case, (planned, wire, grown, stays) in zip(cases, results, strict=True):
            cost = planned.total
            assert cost.received <= wire < cost.received + 20_000, case
            there_before = sum(piece.nbytes for piece in planned.holds) if planned.in_place else 0
            assert grown == pytest.approx(cost.peak - there_before, abs=2e6), case
            assert stays == pytest.approx(cost.kept - there_before, abs=2e6), case


def wait_until_freed(storages: list[StorageWeakRef]) -> None:
    """A thread of gloo holds the tensors of a finished transfer for a moment longer than whoever waited for it."""
    deadline = time.monotonic() + 30
    while not all(storage.expired() for storage in storages):
        assert time.monotonic() < deadline, "something keeps what was received"
        time.sleep(0.001)


def train_and_go_back_and_forth(rank: int, world_size: int) -> dict[str, Any]:
    """Three transitions with a change of the weights between them, the last one with the second still alive."""
    case: Case = (Layout(pipeline=1, tensor=4), Generation(1, 2), "grouped")
    parameters, groups = ragged_model(), ProcessGroups()
    full = full_tensors(parameters, 0)
    plan = plan_transition(*case, parameters)
    resharder = Resharder(plan, groups)
    training = lay_out(plan.ranks[rank], held_in_training(rank, case, parameters, full))
    generation, first = resharder.to_generation(training)
    number = len(groups)
    own = training.tensors["3.up"]
    shared = [piece.data_ptr() == own.data_ptr() for piece in generation.pieces["3.up"]]
    owned = {buffer.data_ptr() for buffer in training.buffers}
    pieces = [piece.untyped_storage() for held in generation.pieces.values() for piece in held]
    received = [StorageWeakRef(storage) for storage in pieces if storage.data_ptr() not in owned]
    del generation, pieces
    wait_until_freed(received)

    training.tensors["3.up"].mul_(-2)
    full["3.up"] = full["3.up"] * -2
    generation, second = resharder.to_generation(training)
    found = {name: generation.tensor(name) for name in generation.pieces}
    wrong = differences(found, needed_in_generation(rank, case, parameters, full))
    third = Resharder(plan, groups).to_generation(training)[1]
    fourth = resharder.to_generation(training)[1]
    return {
        "shared": shared,
        "wrong": wrong,
        "groups": (number, len(groups)),
        "costs": (first, second, third),
        "beside": fourth.peak - third.peak,
        "received": fourth.received,
    }


def test_transitions_repeat_over_the_same_groups_and_send_the_weights_of_now(ranks: Callable[[int], Ranks]) -> None:
    for rank, result in enumerate(ranks(4).run(train_and_go_back_and_forth)):
        assert result["shared"] == [rank % 2 == 0, rank % 2 == 1]
        assert result["wrong"] == []
        assert result["groups"] == (2, 2)
        assert len(set(result["costs"])) == 1
        assert result["beside"] == result["received"], "a generation shard that was not dropped counts for the peak"


def refusals(rank: int, world_size: int) -> list[str]:
    parameters = even_model()
    plan = plan_transition(Layout(1, 2, 1), Generation(1, 1), "grouped", parameters)
    held = held_in_training(rank, (plan.training, plan.generation, "grouped"), parameters, full_tensors(parameters, 0))
    spoilt = {**held, "3.up": held["3.up"].float(), "surprise": torch.zeros(1)}
    del spoilt["0.down"]
    with pytest.raises(ShapeError) as shape:
        lay_out(plan.ranks[rank], spoilt)
    bigger = plan_transition(Layout(1, 4, 1), Generation(1, 1), "grouped", parameters)
    with pytest.raises(HybridFlowError) as size:
        Resharder(bigger, ProcessGroups())
    return [str(shape.value), str(size.value)]


def test_what_does_not_fit_is_refused_before_anything_is_sent(ranks: Callable[[int], Ranks]) -> None:
    for rank, (shape, size) in enumerate(ranks(2).run(refusals)):
        assert "0.down is missing; surprise is not planned here" in shape
        assert "3.up is [8, 3] torch.float32, planned [8, 3] torch.bfloat16" in shape
        assert f"[rank {rank}]" in shape
        assert "planned for 4 ranks; the process group has 2" in size
