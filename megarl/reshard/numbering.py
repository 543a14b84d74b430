"""A number for every element of a set of tensors, so that where an element came from can be seen.

Owns the numbering and what the numbers besides mean. Knows nothing of layouts, plans or loaders.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

import numpy as np

from megarl.reshard.layout import Box

Numbers = np.ndarray[Any, np.dtype[np.int64]]

PADDING = 0
"""In place of a number: an element that belongs to no tensor, set to zero."""

UNWRITTEN = -1
"""In place of a number: an element that nobody has written."""


class Numbering:
    """A number for every element of every tensor: from 1 on, tensor by tensor, row by row.

    >>> numbering = Numbering({"a": (2, 3), "b": (4,)})
    >>> numbering.first("b"), numbering.find(8), numbering.last
    (7, ('b', (1,)), 10)
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = dict(shapes)
        sizes = (math.prod(shape) for shape in self.shapes.values())
        *firsts, end = itertools.accumulate(sizes, initial=1)
        self._firsts = dict(zip(self.shapes, firsts, strict=True))
        self._names, self._starts = list(self.shapes), firsts
        self.last = end - 1

    def first(self, name: str) -> int:
        """The number of a tensor's first element."""
        return self._firsts[name]

    def of(self, name: str, box: Box) -> Numbers:
        """The numbers of the elements in a box of a tensor, in the box's shape.

        >>> Numbering({"a": (2, 3), "b": (4, 2)}).of("b", ((1, 3), (0, 2))).tolist()
        [[9, 10], [11, 12]]
        """
        total = np.array(self._firsts[name], np.int64)
        stride = math.prod(self.shapes[name])
        for (start, end), size in zip(box, self.shapes[name], strict=True):
            stride //= size
            total = np.add.outer(total, np.arange(start, end, dtype=np.int64) * stride)
        return total

    def find(self, number: int) -> tuple[str, tuple[int, ...]] | None:
        """The tensor that has the number, and the element's place in it; None where none has."""
        if not 1 <= number <= self.last:
            return None
        which = bisect_right(self._starts, number) - 1
        name = self._names[which]
        index = np.unravel_index(number - self._starts[which], self.shapes[name] or (1,))
        return name, tuple(int(i) for i in index)[: len(self.shapes[name])]
