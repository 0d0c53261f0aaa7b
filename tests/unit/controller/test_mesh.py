"""The mesh: numbering of ranks and the groups of the paper's examples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.controller.mesh import Mesh
from engine.errors import ShapeError

sizes = st.integers(1, 3)


def _mesh(pipeline: int, tensor: int, data: int, number: int) -> Mesh:
    replicas = [count for count in range(1, pipeline * tensor + 1) if pipeline * tensor % count == 0]
    return Mesh(pipeline, tensor, data, replicas[number % len(replicas)])


meshes = st.builds(_mesh, sizes, sizes, sizes, sizes)


def test_tensor_ranks_are_neighbours_and_data_groups_come_one_after_the_other():
    mesh = Mesh(pipeline=2, tensor=2, data=2)
    assert (mesh.size, mesh.group_size, mesh.replicas) == (8, 4, 2)
    assert [mesh.data_group(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert mesh.group_outputs() == (2, 6)  # last stage, tensor rank 0
    assert mesh.stage_heads() == (0, 2)


def test_replicas_of_the_papers_example():
    """Training 1-4-2, generation with two tensor ranks: engines {1, 3}, {2, 4}, {5, 7}, {6, 8}, counted from 1."""
    mesh = Mesh(pipeline=1, tensor=4, data=2, micro_data=2)
    engines = [[rank + 1 for rank in range(8) if mesh.replica(rank) == replica] for replica in range(mesh.replicas)]
    assert engines == [[1, 3], [2, 4], [5, 7], [6, 8]]
    assert mesh.replica_heads() == (0, 1, 4, 5)


@given(meshes)
def test_every_group_has_equally_many_ranks_and_one_speaker_of_its_own(mesh: Mesh):
    groups = [mesh.data_group(rank) for rank in range(mesh.size)]
    replicas = [mesh.replica(rank) for rank in range(mesh.size)]
    assert {groups.count(group) for group in range(mesh.data)} == {mesh.pipeline * mesh.tensor}
    assert {replicas.count(one) for one in range(mesh.replicas)} == {mesh.size // mesh.replicas}
    assert [mesh.data_group(rank) for rank in mesh.group_outputs()] == list(range(mesh.data))
    assert [mesh.replica(rank) for rank in mesh.replica_heads()] == list(range(mesh.replicas))
    assert len(set(mesh.stage_heads())) == mesh.pipeline


@pytest.mark.parametrize("sizes", [(0, 1, 1, 1), (1, 1, 0, 1), (1, 4, 2, 3), (2, 2, 1, 8)])
def test_a_mesh_that_cannot_be_is_refused(sizes: tuple[int, int, int, int]):
    with pytest.raises(ShapeError, match=r"mesh must|must divide"):
        Mesh(*sizes)
