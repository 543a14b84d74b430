"""Boxes read off arrays of numbers: random cuts are found again, and what is no box is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.errors import LayoutError
from megarl.reshard import recorded
from megarl.reshard.explicit import full_layout
from megarl.reshard.layout import LocalTensor, Padding, Piece, RankLayout, local_box
from megarl.reshard.numbering import Numbering
from megarl.reshard.plan import make_plan
from megarl.reshard.recorded import boxes, from_json, recorded_rank, to_json
from tests.reshard.models import assert_equal, execute

Shapes = dict[str, tuple[int, ...]]


def numbered(numbering: Numbering, name: str) -> np.ndarray:
    shape = numbering.shapes[name]
    first = numbering.first(name)
    return np.arange(first, first + int(np.prod(shape)), dtype=np.int64).reshape(shape)


@st.composite
def stacks(draw: st.DrawFn) -> tuple[Numbering, np.ndarray]:
    """Row ranges of a few tensors of equal width, below one another, with padding in between."""
    width = draw(st.integers(1, 4))
    heights = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    numbering = Numbering({f"t{i}": (height, width) for i, height in enumerate(heights)})
    parts = []
    for _ in range(draw(st.integers(1, 5))):
        if draw(st.booleans()):
            parts.append(np.zeros((draw(st.integers(1, 3)), width), np.int64))
        which = draw(st.integers(0, len(heights) - 1))
        first = draw(st.integers(0, heights[which] - 1))
        end = draw(st.integers(first + 1, heights[which]))
        parts.append(numbered(numbering, f"t{which}")[first:end])
    array = np.concatenate(parts)
    start = draw(st.integers(0, width - 1))
    return numbering, array[:, start : draw(st.integers(start + 1, width))]


def written(
    pieces: tuple[Piece, ...], paddings: tuple[Padding, ...], numbering: Numbering, like: np.ndarray
) -> np.ndarray:
    """The numbers again, from the boxes; fails where two boxes overlap."""
    array = np.full(like.shape, -7, np.int64)
    for piece in pieces:
        place = tuple(slice(*span) for span in local_box(piece.box, piece.at))
        source = numbered(numbering, piece.tensor)[tuple(slice(*span) for span in piece.box)]
        assert (array[place] == -7).all()
        array[place] = source.reshape(array[place].shape)
    for padding in paddings:
        place = tuple(slice(*span) for span in padding.box)
        assert (array[place] == -7).all()
        array[place] = 0
    return array


@given(stacks())
def test_boxes_say_of_every_element_where_it_came_from(case: tuple[Numbering, np.ndarray]) -> None:
    numbering, array = case
    made = boxes("local", array, numbering)
    np.testing.assert_array_equal(written(*made, numbering, array), array)


@given(st.permutations(range(12)))
def test_any_permutation_is_told_in_boxes(order: list[int]) -> None:
    numbering = Numbering({"a": (3, 4)})
    array = numbered(numbering, "a").reshape(-1)[order].reshape(2, 6)
    made = boxes("local", array, numbering)
    np.testing.assert_array_equal(written(*made, numbering, array), array)


def test_one_expert_in_a_stack_and_one_out_of_a_stack_are_each_one_box() -> None:
    numbering = Numbering({"alone": (2, 3), "stack": (4, 2, 3)})
    stacked = np.stack([np.zeros((2, 3), np.int64), numbered(numbering, "alone")])
    pieces, paddings = boxes("w", stacked, numbering)
    assert pieces == (Piece("alone", ((0, 2), (0, 3)), "w", (1, 0, 0)),)
    assert paddings == (Padding("w", ((0, 1), (0, 2), (0, 3))),)
    pieces, _ = boxes("w", numbered(numbering, "stack")[2], numbering)
    assert pieces == (Piece("stack", ((2, 3), (0, 2), (0, 3)), "w", (0, 0)),)


def test_layout_survives_its_text() -> None:
    numbering = Numbering({"a": (2, 3), "b": (2,)})
    held = {"x": np.vstack([numbered(numbering, "a"), np.zeros((1, 3), np.int64)])}
    ranks = [recorded_rank(0, {**held, "y": numbered(numbering, "b")}, numbering)]
    ranks.append(recorded_rank(1, held, numbering))
    layout = from_json(to_json("seen", numbering, ranks))
    assert [sorted_parts(rank) for rank in layout.ranks] == [sorted_parts(rank) for rank in ranks]
    assert [p.name for p in layout.parameters] == ["a", "b"]


def test_stack_of_separate_checkpoint_tensors_is_planned_and_proved_both_ways() -> None:
    numbering = Numbering({**{f"expert{i}": (4, 3) for i in range(3)}, "norm": (3,)})
    experts = [numbered(numbering, f"expert{i}") for i in range(3)]
    halves = [np.stack([e[2 * r : 2 * r + 2] for e in experts]) for r in (0, 1)]
    held = [{"w": half, "n": numbered(numbering, "norm")} for half in halves]
    ranks = [recorded_rank(rank, arrays, numbering) for rank, arrays in enumerate(held)]
    layout = from_json(to_json("seen", numbering, ranks))
    whole = full_layout(layout.table)
    tensors = {name: numbered(numbering, name) for name in numbering.shapes}
    there = execute(make_plan(whole, layout), [tensors], layout)
    assert_equal(there, held)
    assert_equal(execute(make_plan(layout, whole), there, whole), [tensors])


def sorted_parts(rank: RankLayout) -> tuple[set[LocalTensor], set[Piece], set[Padding]]:
    return set(rank.tensors), set(rank.pieces), set(rank.paddings)


def test_element_that_the_loader_left_alone_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"x: the loader left the element at \(1,\) as it was"):
        boxes("x", np.array([1, -1]), Numbering({"a": (2,)}))


def test_number_of_no_element_is_refused() -> None:
    with pytest.raises(LayoutError, match="3 is the number of no element: they go from 1 to 2"):
        boxes("x", np.array([1, 3]), Numbering({"a": (2,)}))


def test_transposed_tensor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MAX_PIECES", 50)
    numbering = Numbering({"a": (10, 10)})
    with pytest.raises(LayoutError, match="the loader transposes or permutes it"):
        boxes("x", numbered(numbering, "a").T, numbering)
