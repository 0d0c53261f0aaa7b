"""The transition from training to generation as plain data: who sends which slices to whom, and what that costs.

Source: HybridFlow (arXiv 2409.19256), section 5 and Table 2. Importable without torch.

Replicated parameters (norms, biases that every tensor rank has) are planned and counted apart from divided ones: the
closed forms of `formula` are about divided bytes only, M = all of them. A rank never receives a replicated
parameter of its own pipeline stage, because it has it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal, get_args

from engine.errors import ConfigError, Problem
from engine.resharding.layout import (
    Generation,
    GenerationGroups,
    Group,
    Layout,
    Parameter,
    Piece,
    Shard,
    generation_shard,
    layout_problems,
    parameter_problems,
    shard,
    training_shard,
)

Strategy = Literal["gather", "vanilla", "grouped"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True)
class AllGather:
    """One collective: member i of the group contributes shards[i], and has all of them afterwards.

    A group of one rank moves nothing: the rank already holds what it needs.
    """

    group: Group
    shards: tuple[Shard, ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes that each member contributes."""
        return tuple(sum(piece.nbytes for piece in pieces) for pieces in self.shards)

    @cached_property
    def divided(self) -> bool:
        """Whether it is about divided parameters; no collective mixes the two kinds."""
        return any(_divided(pieces) for pieces in self.shards)


@dataclass(frozen=True)
class Step:
    """One rank's part in a collective: `own` is its place in the group, `keep` the places that make its generation
    shard; the shards at other places are freed once everything has arrived."""

    gather: AllGather
    own: int
    keep: tuple[int, ...]


@dataclass(frozen=True)
class Cost:
    """Bytes on one rank.

    received: from other ranks. peak: parameters held for generation at the worst moment; a training shard counts
    where it is part of that memory. redundant: training parameters held beside it during generation.
    kept: the generation shard. disjoint: training parameters that generation on this rank has no use for; they need
    memory of their own however cleverly the rest is reused.
    """

    received: int
    peak: int
    redundant: int
    kept: int
    disjoint: int

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(ours + theirs for ours, theirs in zip(self.values(), other.values(), strict=True)))

    def values(self) -> tuple[int, ...]:
        """The five numbers, in the order of the fields."""
        return (self.received, self.peak, self.redundant, self.kept, self.disjoint)


@dataclass(frozen=True)
class Shares:
    """Closed forms of Table 2, in parts of the model's divided bytes M, equal on every rank."""

    received: Fraction
    peak: Fraction
    redundant: Fraction


@dataclass(frozen=True)
class RankPlan:
    """What one rank does. Every parameter it trains belongs to exactly one step.

    in_place: the training shard becomes part of the generation shard; otherwise everything is gathered into memory
    of its own and the training shard stays beside it.
    """

    rank: int
    in_place: bool
    divided_steps: tuple[Step, ...]
    replicated_steps: tuple[Step, ...]
    needs: Shard

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps, in the order in which every rank takes them."""
        return self.divided_steps + self.replicated_steps

    @property
    def holds(self) -> Shard:
        """The training shard."""
        return tuple(piece for step in self.steps for piece in step.gather.shards[step.own])

    @property
    def divided(self) -> Cost:
        """Cost of the parameters that tensor parallelism divides: what `formula` is about."""
        return _cost(self.divided_steps, self.in_place)

    @property
    def replicated(self) -> Cost:
        """Cost of the replicated parameters."""
        return _cost(self.replicated_steps, self.in_place)

    @property
    def total(self) -> Cost:
        """Cost of all parameters."""
        return self.divided + self.replicated


@dataclass(frozen=True)
class Plan:
    """The transition of all ranks, in rank order."""

    training: Layout
    generation: Generation
    strategy: Strategy
    ranks: tuple[RankPlan, ...]

    def groups(self) -> tuple[Group, ...]:
        """Groups of more than one rank that communicate, each once, in an order that is the same on every rank."""
        groups = {step.gather.group for rank in self.ranks for step in rank.steps}
        return tuple(sorted(group for group in groups if len(group) > 1))


def plan_transition(
    training: Layout, generation: Generation, strategy: Strategy, parameters: Sequence[Parameter]
) -> Plan:
    """The plan of one strategy.

    "gather": training divides every parameter over all p t d ranks (ZeRO 3), each rank gathers the whole model and
    keeps its slices. "vanilla": each training replica gathers the whole model, generation groups are consecutive
    ranks. "grouped": each rank gathers only its generation shard, around the training shard that is already there.
    Raises ConfigError, with every problem, if a layout or a parameter does not divide evenly.
    """
    _require_even(training, generation, strategy, parameters)
    groups = GenerationGroups(training, generation, "grouped" if strategy == "grouped" else "vanilla")
    of_rank: dict[int, list[AllGather]] = {rank: [] for rank in range(training.size)}
    for gather in _GATHERS[strategy](groups, parameters):
        for rank in gather.group if any(gather.shards) else ():
            of_rank[rank].append(gather)
    ranks = tuple(
        _rank_plan(rank, strategy == "grouped", gathers, generation_shard(parameters, groups, rank))
        for rank, gathers in of_rank.items()
    )
    return Plan(training, generation, strategy, ranks)


def formula(strategy: Strategy, training: Layout, generation: Generation) -> Shares:
    """Cost per rank where everything divides evenly and all pipeline stages have the same number of bytes.

    Raises ConfigError if the generation layout does not fit into the training layout.
    """
    _refuse(layout_problems(training, generation))
    model_ranks, everyone = training.pipeline * training.tensor, training.size
    needed = Fraction(1, generation.pipeline * generation.tensor)
    if strategy == "gather":
        return Shares(Fraction(everyone - 1, everyone), Fraction(1), Fraction(1, everyone))
    if strategy == "vanilla":
        return Shares(Fraction(model_ranks - 1, model_ranks), Fraction(1), Fraction(1, model_ranks))
    micro_data = model_ranks // (generation.pipeline * generation.tensor)
    return Shares(Fraction(micro_data - 1, model_ranks), needed, Fraction(0))


def _gather_everything(groups: GenerationGroups, parameters: Sequence[Parameter]) -> Iterator[AllGather]:
    """One collective of all ranks per generation stage: shards of the other stages can then be freed."""
    stages, everyone = groups.generation.pipeline, tuple(range(groups.training.size))
    for stage in range(stages):
        shards = [shard(parameters, stages=stages, stage=stage, parts=len(everyone), part=part) for part in everyone]
        yield AllGather(everyone, tuple(_divided(pieces) for pieces in shards))
        # Like ZeRO, which does not partition small parameters: every rank trains with all of the replicated ones.
        yield from (AllGather((rank,), (_replicated(shards[rank]),)) for rank in everyone)


def _gather_replicas(groups: GenerationGroups, parameters: Sequence[Parameter]) -> Iterator[AllGather]:
    held = _training_shards(groups.training, parameters)
    for group in groups.training.model_groups():
        yield AllGather(group, tuple(_divided(held[rank]) for rank in group))
    for group in groups.training.pipeline_groups():
        yield AllGather(group, tuple(_replicated(held[rank]) for rank in group))


def _gather_neighbours(groups: GenerationGroups, parameters: Sequence[Parameter]) -> Iterator[AllGather]:
    held = _training_shards(groups.training, parameters)
    for group in groups.micro_data_groups():
        yield AllGather(group, tuple(_divided(held[rank]) for rank in group))
        for peers in _same_slice(groups.training, group):
            yield AllGather(peers, tuple(_replicated(held[rank]) for rank in peers))


_GATHERS = {"gather": _gather_everything, "vanilla": _gather_replicas, "grouped": _gather_neighbours}


def _same_slice(training: Layout, group: Group) -> list[Group]:
    """The members of a group by their training slice; together they have each stage's replicated parameters once."""
    parts = {rank: training.coordinates(rank).tensor for rank in group}
    return [tuple(rank for rank in group if parts[rank] == part) for part in sorted(set(parts.values()))]


def _training_shards(training: Layout, parameters: Sequence[Parameter]) -> list[Shard]:
    """By rank; replicas share one object."""
    shards = [training_shard(parameters, training, rank) for rank in range(training.pipeline * training.tensor)]
    return shards * training.data


def _rank_plan(rank: int, in_place: bool, gathers: Sequence[AllGather], needs: Shard) -> RankPlan:
    wanted = {piece.parameter.name: piece for piece in needs}
    steps = []
    for gather in gathers:
        keep = tuple(place for place, pieces in enumerate(gather.shards) if _is_wanted(pieces, wanted))
        steps.append(Step(gather, gather.group.index(rank), keep))
    divided = tuple(step for step in steps if step.gather.divided)
    replicated = tuple(step for step in steps if not step.gather.divided)
    return RankPlan(rank, in_place, divided, replicated, needs)


def _is_wanted(pieces: Shard, wanted: dict[str, Piece]) -> bool:
    """One piece decides: generation sizes divide training sizes, so a shard lies inside or outside as a whole."""
    if not pieces or pieces[0].parameter.name not in wanted:
        return False
    return pieces[0].inside(wanted[pieces[0].parameter.name])


def _cost(steps: Sequence[Step], in_place: bool) -> Cost:
    received = peak = redundant = kept = disjoint = 0
    for step in steps:
        sizes = step.gather.sizes
        peak += sum(sizes)
        received += sum(sizes) - sizes[step.own]
        kept += sum(sizes[place] for place in step.keep)
        unused = 0 if step.own in step.keep else sizes[step.own]
        disjoint += unused
        redundant += unused if in_place else sizes[step.own]
    return Cost(received, peak, redundant, kept, disjoint)


def _divided(pieces: Shard) -> Shard:
    return tuple(piece for piece in pieces if piece.parameter.dimension is not None)


def _replicated(pieces: Shard) -> Shard:
    return tuple(piece for piece in pieces if piece.parameter.dimension is None)


def _require_even(
    training: Layout, generation: Generation, strategy: Strategy, parameters: Sequence[Parameter]
) -> None:
    if strategy not in STRATEGIES:
        _refuse([Problem("strategy", strategy, f"use one of {', '.join(STRATEGIES)}")])
    problems = layout_problems(training, generation)
    if strategy == "gather":
        problems += parameter_problems(parameters, generation.pipeline, training.size)
    else:
        problems += parameter_problems(parameters, training.pipeline, training.tensor)
    _refuse(problems)


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise ConfigError("The transition from training to generation cannot be planned:", problems=problems)
