"""Rank numbers on the learner's axes."""

from __future__ import annotations

import pytest

from megarl.errors import LayoutError
from megarl.reshard.mesh import LearnerMesh, ServerMesh


def test_every_rank_has_its_own_coordinates() -> None:
    mesh = LearnerMesh(tp=2, pp=3, dp=4)
    coordinates = [mesh.coordinates(rank) for rank in range(mesh.size)]
    assert len(set(coordinates)) == 24
    assert [mesh.rank(t, p, d) for t, p, d in coordinates] == list(range(24))


def test_data_parallel_neighbours_are_tp_apart() -> None:
    assert list(LearnerMesh(tp=4, pp=2, dp=2).replicas(t=1, p=1)) == [9, 13]


def test_rank_outside_the_mesh_is_refused() -> None:
    with pytest.raises(LayoutError, match="learner rank 8 is not in a mesh of 8 ranks"):
        LearnerMesh(2, 2, 2).coordinates(8)


@pytest.mark.parametrize("make", [lambda: LearnerMesh(tp=0), lambda: ServerMesh(tp=0)])
def test_an_axis_without_ranks_is_refused(make: type) -> None:
    with pytest.raises(LayoutError, match="tp is 0"):
        make()
