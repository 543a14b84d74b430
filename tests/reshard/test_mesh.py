"""Rank numbers on the learner's axes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import LayoutError
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from tests.reshard.megatron_oracle import Oracle


@st.composite
def meshes(draw: st.DrawFn) -> LearnerMesh:
    """Any mesh of up to 256 ranks."""
    tp, pp, cp, dp = (draw(st.sampled_from([1, 2, 3, 4])) for _ in range(4))
    ep = draw(st.sampled_from(divisors(tp * cp * dp)))
    return LearnerMesh(tp, pp, dp, cp, ep, draw(st.sampled_from(divisors(tp * cp * dp // ep))))


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


@settings(max_examples=100)
@given(meshes())
def test_ranks_stand_where_megatrons_rank_generators_put_them(
    megatron: Oracle, mesh: LearnerMesh
) -> None:
    groups = megatron.groups(mesh)
    stages = [mesh.stage(p) for p in range(mesh.pp)]

    def on_every_stage(shards: list[tuple[int, ...]]) -> list[list[int]]:
        return sorted([stage[i] for i in holders] for stage in stages for holders in shards)

    dense, experts = list(mesh.dense_holders()), mesh.expert_holders()
    assert on_every_stage(dense) == sorted(groups["dense"])
    assert on_every_stage([shard for part in experts for shard in part]) == sorted(
        groups["experts"]
    )
    place = {axis: places(groups[axis]) for axis in ("tp", "pp", "ep", "etp")}
    for p, stage in enumerate(stages):
        assert all(place["pp"][rank] == p for rank in stage)
        for t, holders in enumerate(dense):
            assert all(place["tp"][stage[i]] == t for i in holders)
        for e, part in enumerate(experts):
            for x, holders in enumerate(part):
                assert all(
                    (place["ep"][stage[i]], place["etp"][stage[i]]) == (e, x) for i in holders
                )


def places(groups: list[list[int]]) -> dict[int, int]:
    """Each rank's number in its group."""
    return {rank: place for group in groups for place, rank in enumerate(group)}


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


def test_expert_axes_that_do_not_divide_a_stage_are_refused() -> None:
    with pytest.raises(LayoutError, match="ep=3 x etp=2 does not divide the 8 ranks"):
        LearnerMesh(tp=4, dp=2, ep=3, etp=2)


def test_expert_replicas_of_a_stage_are_far_apart_and_its_parts_are_neighbours() -> None:
    mesh = LearnerMesh(tp=2, dp=4, ep=2, etp=2)
    assert mesh.expert_holders() == (((0, 4), (1, 5)), ((2, 6), (3, 7)))
    assert mesh.dense_holders() == ((0, 2, 4, 6), (1, 3, 5, 7))


@pytest.mark.parametrize(
    "make", [lambda: LearnerMesh(tp=8, dp=2**17), lambda: ServerMesh(tp=8, servers=2**17)]
)
def test_more_ranks_than_are_laid_out_are_refused(make: type) -> None:
    with pytest.raises(LayoutError, match="is 1048576 ranks; megarl lays out 131072 at most"):
        make()


def test_negative_layers_of_a_server_stage_are_refused() -> None:
    with pytest.raises(LayoutError, match="has -1 layers in a stage"):
        ServerMesh(tp=1, pp=2, pp_layers=(5, -1))
