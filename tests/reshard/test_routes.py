"""How senders and receivers share work: nobody's load could be lower by moving one unit."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.reshard.routes import interleaved, shares

loads = st.lists(st.integers(0, 60), min_size=1, max_size=6)


@settings(max_examples=150)
@given(loads, st.integers(0, 25), st.integers(1, 9))
def test_units_are_shared_so_that_moving_one_helps_nobody(
    before: list[int], units: int, size: int
) -> None:
    counts = shares(tuple(before), units, size)
    assert sum(counts) == units and min(counts) >= 0
    after = [load + count * size for load, count in zip(before, counts, strict=True)]
    for load, count in zip(after, counts, strict=True):
        assert not count or load - size <= min(after)


@given(loads, st.integers(0, 25))
def test_units_without_size_are_shared_evenly_whatever_the_loads(
    before: list[int], units: int
) -> None:
    counts = shares(tuple(before), units, 0)
    assert sum(counts) == units and max(counts) - min(counts) <= 1


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_interleaved_names_everyone_as_often_as_counted(counts: list[int]) -> None:
    order = interleaved(tuple(counts))
    assert [order.count(i) for i in range(len(counts))] == counts
