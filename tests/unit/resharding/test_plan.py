"""The planned transition against the closed forms of the paper, and against a count of single elements."""

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.resharding.layout import Generation, Layout, Parameter
from engine.resharding.plan import STRATEGIES, Cost, Shares, formula, plan_transition
from tests.unit.resharding.test_layout import PAPER, divisors, indices

NOTHING = Cost(0, 0, 0, 0, 0)


def even_model(training: Layout, layers: int, replicated: bool = False) -> list[Parameter]:
    """Every layer alike; every divided dimension can be cut for all ranks."""
    width = training.size
    parameters = []
    for layer in range(layers):
        parameters.append(Parameter(f"{layer}.up", (2 * width, 3), "bfloat16", layer, dimension=0))
        parameters.append(Parameter(f"{layer}.down", (3, width), "float32", layer, dimension=1))
        if replicated:
            parameters.append(Parameter(f"{layer}.norm", (7,), "float32", layer, dimension=None))
    return parameters


def divided_bytes(parameters: list[Parameter]) -> int:
    sizes = {"up": 2 * 3, "down": 4 * 3}
    return sum(p.extent * sizes[p.name.split(".")[1]] for p in parameters if p.dimension is not None)


def all_layouts(most: int) -> list[tuple[Layout, Generation]]:
    """All layouts with p, t and d up to `most`, with every generation layout that fits."""
    sizes = range(1, most + 1)
    return [
        (Layout(p, t, d), Generation(p_g, t_g))
        for p, t, d in product(sizes, sizes, sizes)
        for p_g, t_g in product(divisors(p), divisors(t))
    ]


@st.composite
def cases(draw):
    """A layout, and a ragged model: stages of different size, three dtypes, some parameters replicated."""
    training, generation = draw(st.sampled_from(all_layouts(4)))
    parameters = []
    for layer in range(training.pipeline * draw(st.integers(1, 2))):
        for number in range(draw(st.integers(1, 3))):
            dtype = draw(st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]))
            dimension = draw(st.sampled_from([0, 1, None]))
            shape = [draw(st.integers(1, 3)), draw(st.integers(1, 3))]
            if dimension is not None:
                shape[dimension] *= training.size
            parameters.append(Parameter(f"{layer}.{number}", tuple(shape), dtype, layer, dimension))
    return training, generation, parameters


def test_the_formulas_for_the_example_of_the_paper():
    """p=1, t=4, d=2 to t_g=2, by hand."""
    generation = Generation(pipeline=1, tensor=2)
    assert formula("gather", PAPER, generation) == Shares(Fraction(7, 8), Fraction(1), Fraction(1, 8))
    assert formula("vanilla", PAPER, generation) == Shares(Fraction(3, 4), Fraction(1), Fraction(1, 4))
    assert formula("grouped", PAPER, generation) == Shares(Fraction(1, 4), Fraction(1, 2), Fraction(0))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_small_layout_costs_what_the_formulas_say(strategy):
    """On every rank, exactly; 256 layouts of up to 64 ranks."""
    for training, generation in all_layouts(4):
        parameters = even_model(training, layers=training.pipeline)
        model, shares = divided_bytes(parameters), formula(strategy, training, generation)
        for rank in plan_transition(training, generation, strategy, parameters).ranks:
            cost = rank.divided
            found = Shares(*(Fraction(value, model) for value in (cost.received, cost.peak, cost.redundant)))
            assert found == shares, (training, generation)
            assert cost.kept * generation.pipeline * generation.tensor == model
            assert rank.replicated == NOTHING


@settings(max_examples=60)
@given(st.sampled_from(all_layouts(4)), st.sampled_from(STRATEGIES), st.integers(1, 3))
def test_the_formulas_hold_whatever_the_number_of_layers_and_beside_replicated_parameters(sizes, strategy, depth):
    training, generation = sizes
    parameters = even_model(training, training.pipeline * depth, replicated=True)
    model, shares = divided_bytes(parameters), formula(strategy, training, generation)
    for rank in plan_transition(training, generation, strategy, parameters).ranks:
        assert rank.divided.received == shares.received * model
        assert rank.divided.peak == shares.peak * model
        assert rank.divided.redundant == shares.redundant * model


@settings(max_examples=80)
@given(cases(), st.sampled_from(STRATEGIES))
def test_a_plan_delivers_exactly_what_generation_needs(case, strategy):
    """Counted element by element: kept shards are disjoint and make up the generation shard."""
    training, generation, parameters = case
    for rank in plan_transition(training, generation, strategy, parameters).ranks:
        kept = [piece for step in rank.steps for place in step.keep for piece in step.gather.shards[place]]
        assert indices(kept) == indices(rank.needs)
        assert sum(piece.stop - piece.start for piece in kept) == len(indices(kept))
        assert rank.total.kept == sum(piece.nbytes for piece in rank.needs)


@settings(max_examples=80)
@given(cases(), st.sampled_from(STRATEGIES))
def test_members_of_a_collective_contribute_what_they_hold(case, strategy):
    """Every rank plans the same collectives in the same order, each shard comes from the rank that trains it."""
    training, generation, parameters = case
    plan = plan_transition(training, generation, strategy, parameters)
    order: dict[tuple[int, ...], list] = {}
    for rank in plan.ranks:
        assert len({piece.parameter.name for piece in rank.holds}) == len(rank.holds)
        for step in rank.steps:
            assert step.gather.group[step.own] == rank.rank
            order.setdefault((rank.rank,), []).append(step.gather)
    for ours, theirs in product(plan.ranks, plan.ranks):
        both = [gather for gather in order[(ours.rank,)] if theirs.rank in gather.group]
        assert both == [gather for gather in order[(theirs.rank,)] if ours.rank in gather.group]
    held = {rank.rank: indices(rank.holds) for rank in plan.ranks}
    for gathers in order.values():
        for gather in gathers:
            for member, pieces in zip(gather.group, gather.shards, strict=True):
                assert indices(pieces) <= held[member]


@settings(max_examples=80)
@given(cases())
def test_grouped_receives_only_what_is_missing(case):
    """Volume of the smallest possible transition: the generation shard without the training shard."""
    training, generation, parameters = case
    for rank in plan_transition(training, generation, "grouped", parameters).ranks:
        held = {(p.parameter.name, p.start, p.stop): p.nbytes for p in rank.holds}
        assert rank.total.received == rank.total.kept - sum(held.values())
        assert rank.total.peak == rank.total.kept
        assert (rank.total.redundant, rank.total.disjoint) == (0, 0)


def test_vanilla_needs_a_second_memory_for_training_on_the_middle_ranks_of_the_paper():
    """Ranks 1 and 2 of each replica train slices that they do not generate with; 0 and 3 happen to."""
    parameters = even_model(PAPER, layers=1)
    model = divided_bytes(parameters)
    plan = plan_transition(PAPER, Generation(1, 2), "vanilla", parameters)
    assert [rank.total.disjoint for rank in plan.ranks] == [0, model // 4, model // 4, 0] * 2


def test_grouped_needs_one_collective_per_micro_group():
    plan = plan_transition(PAPER, Generation(1, 2), "grouped", even_model(PAPER, layers=2))
    assert plan.groups() == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert [len(rank.steps) for rank in plan.ranks] == [1] * 8


def test_replicated_parameters_travel_only_between_stages_and_only_once():
    """4 stages to 2, 2 slices: a rank misses the norms of one other stage, 28 bytes, and has its own."""
    training, generation = Layout(pipeline=4, tensor=2), Generation(pipeline=2, tensor=1)
    parameters = even_model(training, layers=4, replicated=True)
    costs = {name: plan_transition(training, generation, name, parameters).ranks[0].replicated for name in STRATEGIES}
    assert costs["grouped"] == Cost(received=28, peak=56, redundant=0, kept=56, disjoint=0)
    assert costs["vanilla"] == Cost(received=3 * 28, peak=4 * 28, redundant=28, kept=56, disjoint=0)
    assert costs["gather"] == Cost(received=0, peak=4 * 28, redundant=4 * 28, kept=56, disjoint=56)


def test_a_bigger_first_stage_is_counted_as_it_is():
    """An embedding makes the stages unequal: the formulas, which average, no longer hold, the plan does."""
    training, generation = Layout(pipeline=2, tensor=1), Generation(pipeline=1, tensor=1)
    embedding = Parameter("embed", (10, 2), "float32", 0, dimension=0)
    weights = [Parameter(f"{layer}.w", (4,), "float32", layer, dimension=0) for layer in range(2)]
    first, second = plan_transition(training, generation, "grouped", [embedding, *weights]).ranks
    assert (first.total.received, second.total.received) == (16, 96)


def test_everything_that_does_not_divide_is_listed_at_once():
    parameters = [Parameter("a", (6,), "float32", 0, 0), Parameter("b", (8,), "float32", 1, 0)]
    with pytest.raises(ConfigError) as error:
        plan_transition(Layout(pipeline=4, tensor=4), Generation(pipeline=3, tensor=3), "grouped", parameters)
    assert [problem.key for problem in error.value.problems] == [
        "generation.pipeline",
        "generation.tensor",
        "a.shape",
        "pipeline stages",
    ]
    with pytest.raises(ConfigError, match=r"generation\.tensor = 3"):
        formula("vanilla", Layout(1, 4), Generation(1, 3))


def test_gathering_everything_divides_over_all_ranks():
    """4 slices would do for the replicas, 8 do not for all ranks."""
    parameters = [Parameter("a", (4,), "float32", 0, 0)]
    plan_transition(PAPER, Generation(1, 2), "vanilla", parameters)
    with pytest.raises(ConfigError, match="multiple of 8 slices"):
        plan_transition(PAPER, Generation(1, 2), "gather", parameters)


def test_an_unknown_strategy_is_refused():
    with pytest.raises(ConfigError, match="strategy = 'magic': use one of gather, vanilla, grouped"):
        plan_transition(PAPER, Generation(1, 2), "magic", even_model(PAPER, 1))
