"""What moving a policy from training to generation costs: bytes and milliseconds of three strategies side by side.

Usage: python benchmarks/resharding.py [--repeats 3]
Four gloo processes on this machine hold random bfloat16 tensors in the shapes of SmolLM2-135M (269 MB) and move them.
Prints a Markdown table: megabytes are measured, of the rank that needs most; milliseconds are the median over the
repeats of the slowest rank. Slices ignore attention heads (9 heads do not divide by 2), which only an engine minds.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from engine.resharding.execute import DTYPES, ProcessGroups, Resharder, TrainingShard, Transition, lay_out
from engine.resharding.layout import Generation, Layout, Parameter
from engine.resharding.plan import STRATEGIES, Plan, RankPlan, formula, plan_transition

RANKS = 4
LAYERS, HIDDEN, INTERMEDIATE, KEYS, VOCABULARY = 30, 576, 1536, 192, 49152
LAYOUTS = [
    (Layout(pipeline=1, tensor=4), Generation(pipeline=1, tensor=2)),
    (Layout(pipeline=1, tensor=2, data=2), Generation(pipeline=1, tensor=1)),
    (Layout(pipeline=2, tensor=2), Generation(pipeline=1, tensor=2)),
]
MB = 1e6


def smollm2_135m() -> list[Parameter]:
    """Shapes of the model; the head is the embedding."""
    shapes = {
        "q_proj": ((HIDDEN, HIDDEN), 0),
        "k_proj": ((KEYS, HIDDEN), 0),
        "v_proj": ((KEYS, HIDDEN), 0),
        "o_proj": ((HIDDEN, HIDDEN), 1),
        "gate_proj": ((INTERMEDIATE, HIDDEN), 0),
        "up_proj": ((INTERMEDIATE, HIDDEN), 0),
        "down_proj": ((HIDDEN, INTERMEDIATE), 1),
        "input_layernorm": ((HIDDEN,), None),
        "post_attention_layernorm": ((HIDDEN,), None),
    }
    layers = [
        Parameter(f"layers.{layer}.{name}", shape, "bfloat16", layer, dimension)
        for layer in range(LAYERS)
        for name, (shape, dimension) in shapes.items()
    ]
    embedding = Parameter("embed_tokens", (VOCABULARY, HIDDEN), "bfloat16", 0, 0)
    return [embedding, *layers, Parameter("norm", (HIDDEN,), "bfloat16", LAYERS - 1, None)]


def random_shard(plan: RankPlan) -> TrainingShard:
    """Random training parameters of this rank."""
    generator = torch.Generator().manual_seed(plan.rank)

    def fill(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float32).to(dtype)

    return lay_out(plan, {p.parameter.name: fill(p.shape, DTYPES[p.parameter.dtype]) for p in plan.holds})


def measure(plans: list[Plan], groups: ProcessGroups, repeats: int) -> list[tuple[Transition, float]]:
    """(cost, median milliseconds) of each plan on this rank.

    The plans take turns, so that whatever else the machine does meets all of them; a first turn opens connections.
    """
    resharders = [Resharder(plan, groups) for plan in plans]
    shards = [random_shard(resharder.plan) for resharder in resharders]
    costs: list[Transition] = []
    seconds: list[list[float]] = [[] for _ in plans]
    for turn in range(repeats + 1):
        costs = []
        for resharder, training, taken in zip(resharders, shards, seconds, strict=True):
            dist.barrier()
            start = time.perf_counter()
            costs.append(resharder.to_generation(training)[1])
            dist.barrier()
            taken += [time.perf_counter() - start] if turn else []
    return [(cost, statistics.median(taken) * 1000) for cost, taken in zip(costs, seconds, strict=True)]


def row(plan: Plan, costs: list[Transition], milliseconds: float, model: int) -> str:
    """One line of the table; megabytes by the formulas, which assume equal stages, in brackets."""
    training, generation = plan.training, plan.generation
    shares = formula(plan.strategy, training, generation)
    most = [max(cost.received for cost in costs), max(cost.peak for cost in costs), max(c.redundant for c in costs)]
    by_formula = [float(share) * model for share in (shares.received, shares.peak, shares.redundant)]
    cells = [f"{found / MB:.1f} ({closed / MB:.1f})" for found, closed in zip(most, by_formula, strict=True)]
    sizes = f"{training.pipeline}-{training.tensor}-{training.data} | {generation.pipeline}-{generation.tensor}"
    return f"| {sizes} | {plan.strategy} | {' | '.join(cells)} | {milliseconds:.0f} |"


def run_rank(rank: int, rendezvous: str, repeats: int) -> None:
    """One of the processes; the first one prints."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=120)
    )
    parameters, groups = smollm2_135m(), ProcessGroups()
    divided = sum(torch.Size(p.shape).numel() * p.item_bytes for p in parameters if p.dimension is not None)
    if rank == 0:
        print("| training p-t-d | generation p-t | strategy | received MB | peak MB | redundant MB | median ms |")
        print("|---|---|---|---|---|---|---|")
    for layout in LAYOUTS:
        plans = [plan_transition(*layout, strategy, parameters) for strategy in STRATEGIES]
        results: list[list[tuple[Transition, float]]] = [[]] * RANKS
        dist.all_gather_object(results, measure(plans, groups, repeats))
        for plan, of_ranks in zip(plans, zip(*results, strict=True), strict=True):
            if rank == 0:
                print(row(plan, [cost for cost, _ in of_ranks], max(ms for _, ms in of_ranks), divided), flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Start the processes and wait for the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = str(Path(folder) / "rendezvous")
        ranks = [context.Process(target=run_rank, args=(rank, rendezvous, repeats)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    raise SystemExit(max(abs(process.exitcode or 0) for process in ranks))


if __name__ == "__main__":
    main()
