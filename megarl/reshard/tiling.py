"""Whether boxes tile a tensor exactly, and where they do not. Pure geometry."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from megarl.reshard.layout import Box, Ints


def first_defect(
    boxes: Sequence[tuple[Box, str]], target: Box
) -> tuple[Box, tuple[str, ...]] | None:
    """The first part of `target` that is not in exactly one box, with the names of those it is in.

    A box that reaches beyond `target` is a defect too. None where the boxes tile the target.

    >>> first_defect([(((0, 2),), "a"), (((2, 4),), "b")], ((0, 4),))
    >>> first_defect([(((0, 2),), "a"), (((1, 4),), "b")], ((0, 4),))
    (((1, 2),), ('a', 'b'))
    >>> first_defect([(((0, 2),), "a")], ((0, 4),))
    (((2, 4),), ())
    """
    for box, name in boxes:
        if not inside(box, target):
            return box, (name, "beyond the tensor")
    if not target:
        return None
    (low, high), rest = target[0], target[1:]
    cuts = sorted({low, high, *(edge for box, _ in boxes for edge in box[0])})
    slabs: list[list[tuple[Box, str]]] = [[] for _ in cuts[1:]]
    for box, name in boxes:
        first, last = bisect_left(cuts, box[0][0]), bisect_left(cuts, box[0][1])
        for slab in range(first, last):
            slabs[slab].append((box[1:], name))
    for start, end, slab_boxes in zip(cuts, cuts[1:], slabs, strict=False):
        if len(slab_boxes) == 1 and slab_boxes[0][0] == rest:
            continue
        if not slab_boxes or not rest:
            return ((start, end), *rest), tuple(name for _, name in slab_boxes)
        deeper = first_defect(slab_boxes, rest)
        if deeper is not None:
            return ((start, end), *deeper[0]), deeper[1]
    return None


def inside(box: Box, outer: Box) -> bool:
    """Whether a box with elements lies within another."""
    return len(box) == len(outer) and all(
        low <= start < end <= high for (start, end), (low, high) in zip(box, outer, strict=True)
    )


def shown(box: Box) -> str:
    """A box as errors write it.

    >>> shown(((0, 2), (4, 8)))
    '[0:2, 4:8]'
    """
    return "[" + ", ".join(f"{start}:{end}" for start, end in box) + "]"


def untiled(part: Ints, low: Ints, high: Ints, shape: Sequence[int], num_parts: int) -> int | None:
    """The first of `num_parts` tensors of one `shape` that its boxes do not tile exactly, or None.

    Row i is the box [low[i], high[i]) of tensor part[i]. Each element is counted: a box adds one at
    its first corner and takes it away behind its others, on a grid of all edges, and sums along the
    dims give every grid cell its count, which must be one.

    >>> untiled(np.array([0, 0]), np.array([[0], [2]]), np.array([[2], [4]]), [4], 1)
    >>> untiled(np.array([0, 0]), np.array([[0], [1]]), np.array([[2], [4]]), [4], 1)
    0
    """
    if len(part) == num_parts == 1 and part[0] == 0:  # most tensors are one whole box
        whole = not low.any() and bool((high == np.array(shape, np.int64)).all())
        return None if whole else 0
    outside = ((low < 0) | (high > np.array(shape, np.int64)) | (low >= high)).any(axis=1)
    if outside.any():
        return int(part[outside].min())
    sizes, first, end = [], [], []
    for dim, size in enumerate(shape):
        edges = np.unique(np.concatenate([[0, size], low[:, dim], high[:, dim]]))
        sizes.append(len(edges))
        first.append(np.searchsorted(edges, low[:, dim]))
        end.append(np.searchsorted(edges, high[:, dim]))
    grid = np.zeros((num_parts, *sizes), np.int32)
    for corner in itertools.product((0, 1), repeat=len(sizes)):
        index = tuple((first, end)[behind][dim] for dim, behind in enumerate(corner))
        np.add.at(grid, (part, *index), -1 if sum(corner) % 2 else 1)
    for dim in range(1, grid.ndim):
        np.cumsum(grid, axis=dim, out=grid)
    inner = grid[(slice(None), *(slice(0, size - 1) for size in sizes))]
    wrong = (inner != 1).reshape(num_parts, -1).any(axis=1)
    return int(wrong.argmax()) if wrong.any() else None
