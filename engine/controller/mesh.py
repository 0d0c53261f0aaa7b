"""Mesh: how the ranks of one role are arranged for pipeline, tensor and data parallelism."""

from dataclasses import dataclass

from engine.errors import ShapeError


@dataclass(frozen=True)
class Mesh:
    """p x t x d ranks, numbered with `data` outermost, then `pipeline`, then `tensor`.

    A DP group is one whole model: the p x t ranks of equal data coordinate. micro_data: generation replicas that such a
    group turns into (d_g = p t / (p_g t_g) of the HybridFlow paper); replica k holds the ranks k, k + d_g, k + 2 d_g...
    of its group, so that the ranks which gather weights from each other are neighbours.
    Raises ShapeError for a size below 1 or a number of replicas that does not divide p t.
    """

    pipeline: int = 1
    tensor: int = 1
    data: int = 1
    micro_data: int = 1

    def __post_init__(self) -> None:
        if min(self.pipeline, self.tensor, self.data, self.micro_data) < 1:
            raise ShapeError(f"every size of a mesh must be at least 1; found {self}.")
        if self.group_size % self.micro_data:
            raise ShapeError(
                f"{self.micro_data} generation replicas were asked for in DP groups of {self.pipeline} x {self.tensor} "
                f"ranks; the number of replicas must divide {self.group_size}."
            )

    @property
    def size(self) -> int:
        """All ranks."""
        return self.group_size * self.data

    @property
    def group_size(self) -> int:
        """Ranks of one DP group."""
        return self.pipeline * self.tensor

    @property
    def replicas(self) -> int:
        """Generation replicas of all DP groups."""
        return self.data * self.micro_data

    def data_group(self, rank: int) -> int:
        """DP group of a rank."""
        return rank // self.group_size

    def replica(self, rank: int) -> int:
        """Generation replica of a rank, counted through all DP groups."""
        return self.data_group(rank) * self.micro_data + rank % self.group_size % self.micro_data

    def group_outputs(self) -> tuple[int, ...]:
        """Of each DP group the rank that has its output: last pipeline stage, tensor rank 0."""
        last = (self.pipeline - 1) * self.tensor
        return tuple(group * self.group_size + last for group in range(self.data))

    def replica_heads(self) -> tuple[int, ...]:
        """Of each generation replica the first rank."""
        return tuple(
            group * self.group_size + replica for group in range(self.data) for replica in range(self.micro_data)
        )

    def stage_heads(self) -> tuple[int, ...]:
        """Of each pipeline stage the rank of data group 0 and tensor rank 0."""
        return tuple(stage * self.tensor for stage in range(self.pipeline))
