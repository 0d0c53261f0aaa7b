"""Who works with whom and who holds what: training layout (p, t, d), generation layout (p_g, t_g), slices of parameters.

Plain data, importable without torch. Ranks count from 0 and are numbered with the tensor dimension innermost:
rank = (data * p + pipeline) * t + tensor. Groups list their ranks in ascending order.
Source: HybridFlow (arXiv 2409.19256), section 5.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from engine.errors import ConfigError, Problem

Grouping = Literal["vanilla", "grouped"]
Group = tuple[int, ...]

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


class Coordinates(NamedTuple):
    """Place of a rank in the training layout."""

    data: int
    pipeline: int
    tensor: int


class GenerationCoordinates(NamedTuple):
    """Place of a rank in the generation layout; (data, micro) numbers the replica of the model that it belongs to."""

    data: int
    micro: int
    pipeline: int
    tensor: int


@dataclass(frozen=True)
class Layout:
    """Training layout: p pipeline stages, t tensor slices, d replicas of the model. ConfigError for a size below 1."""

    pipeline: int
    tensor: int
    data: int = 1

    def __post_init__(self) -> None:
        sizes = {"pipeline": self.pipeline, "tensor": self.tensor, "data": self.data}
        _refuse("The training layout is impossible:", _too_small("training", sizes))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.pipeline * self.tensor * self.data

    def coordinates(self, rank: int) -> Coordinates:
        """Place of a rank; inverse of `rank`."""
        rest, tensor = divmod(rank, self.tensor)
        return Coordinates(*divmod(rest, self.pipeline), tensor)

    def rank(self, place: Coordinates) -> int:
        """Rank at a place."""
        return (place.data * self.pipeline + place.pipeline) * self.tensor + place.tensor

    def tensor_groups(self) -> tuple[Group, ...]:
        """Ranks that hold the slices of one pipeline stage of one replica."""
        return self.groups(lambda place: (place.data, place.pipeline))

    def pipeline_groups(self) -> tuple[Group, ...]:
        """Ranks that hold the same slice of every stage of one replica."""
        return self.groups(lambda place: (place.data, place.tensor))

    def data_groups(self) -> tuple[Group, ...]:
        """Ranks that hold the same parameters."""
        return self.groups(lambda place: (place.pipeline, place.tensor))

    def model_groups(self) -> tuple[Group, ...]:
        """Ranks that together hold one replica."""
        return self.groups(lambda place: place.data)

    def groups(self, key: Callable[[Coordinates], Hashable]) -> tuple[Group, ...]:
        """Ranks whose places have the same key, in order of their first rank."""
        return _together(self.size, lambda rank: key(self.coordinates(rank)))


@dataclass(frozen=True)
class Generation:
    """Generation layout inside each training replica: p_g pipeline stages, t_g tensor slices. ConfigError below 1."""

    pipeline: int
    tensor: int

    def __post_init__(self) -> None:
        sizes = {"pipeline": self.pipeline, "tensor": self.tensor}
        _refuse("The generation layout is impossible:", _too_small("generation", sizes))


@dataclass(frozen=True)
class GenerationGroups:
    """Generation groups of the training ranks: d_g = p t / (p_g t_g) micro-replicas inside each training replica.

    "vanilla": generation tensor (then pipeline) groups are consecutive ranks; the slice that a rank generates with
    may lie anywhere in the model. "grouped": they take ranks at stride t / t_g and stages at stride p / p_g, and
    neighbours form a micro data parallel group; so what a rank trains is always part of what it generates with.
    Neighbours are consecutive ranks, along the tensor and then the pipeline dimension.
    Raises ConfigError, with every problem, if a generation size does not divide its training size.
    """

    training: Layout
    generation: Generation
    method: Grouping

    def __post_init__(self) -> None:
        _refuse("The generation layout does not fit:", layout_problems(self.training, self.generation))

    @property
    def micro_data(self) -> int:
        """d_g: replicas for generation in one training replica."""
        return self._stages * self._slices

    @property
    def _stages(self) -> int:
        return self.training.pipeline // self.generation.pipeline

    @property
    def _slices(self) -> int:
        return self.training.tensor // self.generation.tensor

    def coordinates(self, rank: int) -> GenerationCoordinates:
        """Place of a rank in the generation layout."""
        place = self.training.coordinates(rank)
        if self.method == "grouped":
            stage, micro_stage = divmod(place.pipeline, self._stages)
            part, micro_part = divmod(place.tensor, self._slices)
            return GenerationCoordinates(place.data, micro_stage * self._slices + micro_part, stage, part)
        rest, part = divmod(place.pipeline * self.training.tensor + place.tensor, self.generation.tensor)
        micro, stage = divmod(rest, self.generation.pipeline)
        return GenerationCoordinates(place.data, micro, stage, part)

    def tensor_groups(self) -> tuple[Group, ...]:
        """Ranks that hold the slices of one generation stage of one micro-replica."""
        return self._groups(lambda place: (place.data, place.micro, place.pipeline))

    def pipeline_groups(self) -> tuple[Group, ...]:
        """Ranks that hold the same slice of every generation stage of one micro-replica."""
        return self._groups(lambda place: (place.data, place.micro, place.tensor))

    def micro_data_groups(self) -> tuple[Group, ...]:
        """Ranks of one training replica that generate with the same parameters."""
        return self._groups(lambda place: (place.data, place.pipeline, place.tensor))

    def _groups(self, key: Callable[[GenerationCoordinates], Hashable]) -> tuple[Group, ...]:
        return _together(self.training.size, lambda rank: key(self.coordinates(rank)))


@dataclass(frozen=True)
class Parameter:
    """One parameter of the whole model.

    dtype: a key of ITEM_BYTES; layer: its place in the pipeline, from 0 (embeddings go with the first layer, the head
    with the last); dimension: the one that tensor parallelism divides, None if every tensor rank has all of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layer: int
    dimension: int | None

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def extent(self) -> int:
        """Length of the divided dimension; 1 for a replicated parameter, which is never cut."""
        return 1 if self.dimension is None else self.shape[self.dimension]


@dataclass(frozen=True)
class Piece:
    """Indices start <= i < stop of a parameter along its divided dimension."""

    parameter: Parameter
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the piece as a tensor."""
        dimension, shape = self.parameter.dimension, self.parameter.shape
        if dimension is None:
            return shape
        return (*shape[:dimension], self.stop - self.start, *shape[dimension + 1 :])

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        size = self.parameter.item_bytes
        for extent in self.shape:
            size *= extent
        return size

    def inside(self, other: "Piece") -> bool:
        """Whether the other piece contains this one."""
        return self.parameter == other.parameter and other.start <= self.start and self.stop <= other.stop


Shard = tuple[Piece, ...]


def shard(parameters: Sequence[Parameter], *, stages: int, stage: int, parts: int, part: int) -> Shard:
    """Slice `part` of `parts` of every parameter in stage `stage` of `stages`; replicated parameters are whole."""
    layers = count_layers(parameters)
    return tuple(
        _cut(parameter, parts, part) for parameter in parameters if parameter.layer * stages // layers == stage
    )


def training_shard(parameters: Sequence[Parameter], layout: Layout, rank: int) -> Shard:
    """What a rank holds while it trains with tensor and pipeline parallelism."""
    place = layout.coordinates(rank)
    return shard(parameters, stages=layout.pipeline, stage=place.pipeline, parts=layout.tensor, part=place.tensor)


def generation_shard(parameters: Sequence[Parameter], groups: GenerationGroups, rank: int) -> Shard:
    """What a rank needs for generation."""
    place, sizes = groups.coordinates(rank), groups.generation
    return shard(parameters, stages=sizes.pipeline, stage=place.pipeline, parts=sizes.tensor, part=place.tensor)


def count_layers(parameters: Sequence[Parameter]) -> int:
    """Layers of the model: the largest layer index and one."""
    return max(parameter.layer for parameter in parameters) + 1


def layout_problems(training: Layout, generation: Generation) -> list[Problem]:
    """Why a generation layout does not fit into a training layout; empty if it does."""
    pairs = [
        ("pipeline", generation.pipeline, training.pipeline),
        ("tensor", generation.tensor, training.tensor),
    ]
    return [
        Problem(f"generation.{key}", size, f"must divide training.{key} = {whole}; use one of {_divisors(whole)}")
        for key, size, whole in pairs
        if whole % size
    ]


def parameter_problems(parameters: Sequence[Parameter], stages: int, parts: int) -> list[Problem]:
    """Why parameters cannot be divided evenly over pipeline stages and tensor slices; empty if they can."""
    if not parameters:
        return [Problem("parameters", [], "name at least one parameter")]
    problems = [problem for parameter in parameters for problem in _problems_of(parameter, parts)]
    names = Counter(parameter.name for parameter in parameters)
    twice = sorted(name for name, count in names.items() if count > 1)
    problems += [
        Problem(f"{name}.name", name, "appears twice; give every parameter a name of its own") for name in twice
    ]
    layers = count_layers(parameters)
    empty = sorted(set(range(layers)) - {parameter.layer for parameter in parameters})
    if empty:
        problems.append(Problem("layers", empty, "have no parameter; number the layers from 0 without gaps"))
    if layers % stages:
        problems.append(
            Problem("pipeline stages", stages, f"must divide the {layers} layers; use one of {_divisors(layers)}")
        )
    return problems


def _problems_of(parameter: Parameter, parts: int) -> list[Problem]:
    name, shape, dimension = parameter.name, parameter.shape, parameter.dimension
    problems = []
    if parameter.dtype not in ITEM_BYTES:
        problems.append(Problem(f"{name}.dtype", parameter.dtype, f"use one of {', '.join(ITEM_BYTES)}"))
    if parameter.layer < 0:
        problems.append(Problem(f"{name}.layer", parameter.layer, "layers count from 0"))
    if any(extent < 1 for extent in shape):
        problems.append(Problem(f"{name}.shape", shape, "every extent must be at least 1"))
    if dimension is not None and not 0 <= dimension < len(shape):
        problems.append(Problem(f"{name}.dimension", dimension, f"must be from 0 to {len(shape) - 1}, or None"))
    elif parameter.extent % parts and dimension is not None:
        remedy = f"dimension {dimension} must be a multiple of {parts} slices; use fewer, or None to replicate it"
        problems.append(Problem(f"{name}.shape", shape, remedy))
    return problems


def _cut(parameter: Parameter, parts: int, part: int) -> Piece:
    if parameter.dimension is None:
        return Piece(parameter, 0, 1)
    width = parameter.extent // parts
    return Piece(parameter, part * width, (part + 1) * width)


def _together(size: int, key: Callable[[int], Hashable]) -> tuple[Group, ...]:
    members: dict[Hashable, list[int]] = {}
    for rank in range(size):
        members.setdefault(key(rank), []).append(rank)
    return tuple(tuple(ranks) for ranks in members.values())


def _too_small(section: str, sizes: dict[str, int]) -> list[Problem]:
    return [Problem(f"{section}.{key}", size, "must be at least 1") for key, size in sizes.items() if size < 1]


def _divisors(number: int) -> str:
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)


def _refuse(message: str, problems: list[Problem]) -> None:
    if problems:
        raise ConfigError(message, problems=problems)
