"""Groups and slices of the training and generation layouts."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.resharding.layout import (
    Coordinates,
    Generation,
    GenerationGroups,
    Layout,
    Parameter,
    generation_shard,
    parameter_problems,
    training_shard,
)

PAPER = Layout(pipeline=1, tensor=4, data=2)


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


@st.composite
def layouts(draw) -> tuple[Layout, Generation]:
    """A training layout of at most 4 x 6 x 3 ranks and a generation layout that fits into it."""
    training = Layout(draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 6)), draw(st.integers(1, 3)))
    stages, slices = (draw(st.sampled_from(divisors(size))) for size in (training.pipeline, training.tensor))
    return training, Generation(stages, slices)


def model(training: Layout) -> list[Parameter]:
    """One divided and one replicated parameter in every layer; a layer for each stage."""
    return [
        parameter
        for layer in range(training.pipeline)
        for parameter in (
            Parameter(f"{layer}.weight", (3, 2 * training.tensor), "float32", layer, dimension=1),
            Parameter(f"{layer}.norm", (5,), "float32", layer, dimension=None),
        )
    ]


def indices(pieces) -> set[tuple[str, int]]:
    return {(piece.parameter.name, index) for piece in pieces for index in range(piece.start, piece.stop)}


def test_the_example_of_the_paper_grouped():
    """Its ranks 1 to 8 are 0 to 7 here: TP {1,3},{2,4},{5,7},{6,8}, micro-DP {1,2},{3,4},{5,6},{7,8}."""
    groups = GenerationGroups(PAPER, Generation(pipeline=1, tensor=2), "grouped")
    assert groups.tensor_groups() == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert groups.micro_data_groups() == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert groups.micro_data == 2


def test_the_example_of_the_paper_vanilla():
    """TP {1,2},{3,4},{5,6},{7,8}: consecutive ranks; ranks 2 and 3 then need slices that they do not train."""
    groups = GenerationGroups(PAPER, Generation(pipeline=1, tensor=2), "vanilla")
    assert groups.tensor_groups() == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert groups.micro_data_groups() == ((0, 2), (1, 3), (4, 6), (5, 7))


def test_the_training_groups_of_two_stages_two_slices_two_replicas():
    layout = Layout(pipeline=2, tensor=2, data=2)
    assert layout.tensor_groups() == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.pipeline_groups() == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.data_groups() == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.model_groups() == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert layout.coordinates(6) == Coordinates(data=1, pipeline=1, tensor=0)


def test_two_stages_become_one_by_pairing_ranks_of_neighbouring_stages():
    """With stages merged and slices kept, neighbours lie t ranks apart."""
    groups = GenerationGroups(Layout(pipeline=4, tensor=2), Generation(pipeline=2, tensor=2), "grouped")
    assert groups.micro_data_groups() == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert groups.pipeline_groups() == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert groups.tensor_groups() == ((0, 1), (2, 3), (4, 5), (6, 7))


@given(layouts())
def test_a_rank_has_one_place_and_a_place_one_rank(sizes):
    training, _ = sizes
    places = [training.coordinates(rank) for rank in range(training.size)]
    assert len(set(places)) == training.size
    assert [training.rank(place) for place in places] == list(range(training.size))


@given(layouts(), st.sampled_from(["vanilla", "grouped"]))
def test_every_kind_of_group_holds_every_rank_once(sizes, method):
    training, generation = sizes
    groups = GenerationGroups(training, generation, method)
    expected = {
        groups.tensor_groups: generation.tensor,
        groups.pipeline_groups: generation.pipeline,
        groups.micro_data_groups: groups.micro_data,
    }
    for kind, size in expected.items():
        assert {len(group) for group in kind()} == {size}
        assert sorted(rank for group in kind() for rank in group) == list(range(training.size))
    assert len({groups.coordinates(rank) for rank in range(training.size)}) == training.size


@given(layouts())
def test_grouped_takes_ranks_at_the_strides_of_the_paper(sizes):
    training, generation = sizes
    groups = GenerationGroups(training, generation, "grouped")
    tensor_stride = training.tensor // generation.tensor
    stage_stride = training.pipeline // generation.pipeline * training.tensor
    for kind, stride in ((groups.tensor_groups(), tensor_stride), (groups.pipeline_groups(), stage_stride)):
        assert all(later - earlier == stride for group in kind for earlier, later in pairwise(group))


@given(layouts())
def test_vanilla_tensor_groups_are_consecutive_ranks(sizes):
    training, generation = sizes
    for group in GenerationGroups(training, generation, "vanilla").tensor_groups():
        assert group == tuple(range(group[0], group[0] + generation.tensor))


@given(layouts(), st.sampled_from(["vanilla", "grouped"]))
def test_one_micro_replica_holds_the_whole_model_without_overlap(sizes, method):
    training, generation = sizes
    parameters, groups = model(training), GenerationGroups(training, generation, method)
    whole = {(p.name, index) for p in parameters for index in range(p.extent)}
    replicas: dict[tuple[int, int], list] = {}
    for rank in range(training.size):
        place = groups.coordinates(rank)
        replicas.setdefault((place.data, place.micro), []).append(generation_shard(parameters, groups, rank))
    assert len(replicas) == training.data * groups.micro_data
    for shards in replicas.values():
        assert set().union(*map(indices, shards)) == whole
        divided = [entry for shard in shards for entry in indices(shard) if entry[0].endswith("weight")]
        assert len(divided) == len(set(divided))


@given(layouts())
def test_grouped_generates_with_what_it_trains(sizes):
    training, generation = sizes
    parameters, groups = model(training), GenerationGroups(training, generation, "grouped")
    for rank in range(training.size):
        held = indices(training_shard(parameters, training, rank))
        assert held <= indices(generation_shard(parameters, groups, rank))


def test_a_training_shard_is_a_slice_of_one_stage():
    parameters = model(Layout(pipeline=2, tensor=4))
    weight, norm = training_shard(parameters, Layout(pipeline=2, tensor=4), 6)
    assert (weight.parameter.name, weight.start, weight.stop, weight.shape, weight.nbytes) == (
        "1.weight",
        4,
        6,
        (3, 2),
        24,
    )
    assert (norm.parameter.name, norm.shape, norm.nbytes) == ("1.norm", (5,), 20)


def test_a_generation_layout_that_does_not_divide_names_every_size():
    with pytest.raises(ConfigError) as error:
        GenerationGroups(Layout(pipeline=4, tensor=6), Generation(pipeline=3, tensor=4), "grouped")
    assert [(problem.key, problem.value) for problem in error.value.problems] == [
        ("generation.pipeline", 3),
        ("generation.tensor", 4),
    ]
    assert "must divide training.tensor = 6; use one of 1, 2, 3, 6" in str(error.value)


def test_sizes_below_one_are_refused_together():
    with pytest.raises(ConfigError) as error:
        Layout(pipeline=0, tensor=2, data=-1)
    assert [(problem.key, problem.value) for problem in error.value.problems] == [
        ("training.pipeline", 0),
        ("training.data", -1),
    ]
    with pytest.raises(ConfigError, match=r"generation\.tensor = 0"):
        Generation(pipeline=1, tensor=0)


def test_parameters_that_cannot_be_divided_are_listed_with_remedies():
    parameters = [
        Parameter("narrow", (6, 3), "float32", 0, dimension=0),
        Parameter("flat", (8,), "float32", 0, dimension=1),
        Parameter("odd", (8,), "int3", 2, dimension=0),
        Parameter("odd", (0,), "float32", 2, dimension=None),
        Parameter("before", (8,), "float32", -1, dimension=None),
    ]
    problems = {problem.key: problem.remedy for problem in parameter_problems(parameters, stages=2, parts=4)}
    assert problems == {
        "narrow.shape": "dimension 0 must be a multiple of 4 slices; use fewer, or None to replicate it",
        "flat.dimension": "must be from 0 to 0, or None",
        "odd.dtype": "use one of float64, float32, bfloat16, float16, float8_e4m3fn",
        "odd.shape": "every extent must be at least 1",
        "before.layer": "layers count from 0",
        "odd.name": "appears twice; give every parameter a name of its own",
        "layers": "have no parameter; number the layers from 0 without gaps",
        "pipeline stages": "must divide the 3 layers; use one of 1, 3",
    }
    assert parameter_problems([], 1, 1)[0].key == "parameters"
