"""The checksum's inner loop and a copy past the caches in C, where setup.py could compile them.

Owns finding and calling the library that is made of `sums.c`. Without it (no C compiler at install)
`checksum` does the same in numpy, several times slower, and torch copies. Calls release Python's
lock.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import logging
from pathlib import Path

import numpy as np
import numpy.typing as npt

log = logging.getLogger(__name__)

LIBRARY = "_sums"
FIELDS = 8
"""Of a box in a table, each of 8 bytes: address, runs, elements of a run, elements from run to run,
address of the runs' starts, identity, bytes of an element, exponent (`struct box` in sums.c)."""

# R runs, L elements of a run, N boxes
Table = npt.NDArray[np.uint64]  # [N, FIELDS]


class Library:
    """The functions in the library at `path`. Raises OSError or AttributeError where it is none."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._copy = library.megarl_copy
        self._copy.restype = None
        self._copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self._sum_boxes = library.megarl_sum_boxes
        self._sum_boxes.restype = None
        self._sum_boxes.argtypes = (
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_void_p,
            ctypes.c_void_p,
        )

    def copy(self, destination: int, source: int, num_bytes: int) -> None:
        """Copy between two addresses, for copies of more than the caches hold."""
        self._copy(destination, source, num_bytes)

    def sum_boxes(self, table: Table) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
        """The checksum of each box, and whether it has an element that is not finite: both [N].

        What the table has addresses of must stay meanwhile.
        """
        assert table.dtype == np.uint64 and table.flags.c_contiguous
        assert table.shape[1] == FIELDS
        sums, not_finite = np.empty(len(table), np.uint64), np.empty(len(table), np.bool_)
        self._sum_boxes(table.ctypes.data, len(table), sums.ctypes.data, not_finite.ctypes.data)
        return sums, not_finite

    def sum_runs(
        self,
        rows: npt.NDArray[np.unsignedinteger],
        starts: npt.NDArray[np.uint64],
        identity: int,
    ) -> int:
        """The checksum of rows [R, L], each contiguous, of which row r starts at starts[r] [R]."""
        num_runs, length = rows.shape
        assert starts.shape == (num_runs,) and starts.flags.c_contiguous
        assert length < 2 or rows.strides[1] == rows.itemsize
        stride = rows.strides[0] // rows.itemsize % 2**64
        fields = (
            rows.ctypes.data, num_runs, length, stride, starts.ctypes.data, identity,
            rows.itemsize, 0,
        )  # fmt: skip
        sums, _ = self.sum_boxes(np.array([fields], np.uint64))
        return int(sums[0])


@functools.cache
def find() -> Library | None:
    """The library; None where it was not built."""
    folder = Path(__file__).parent
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"{LIBRARY}{suffix}"
        if path.is_file():
            try:
                return Library(path)
            except (OSError, AttributeError) as error:
                log.warning("compiled checksum not usable path=%s error=%s", path, error)
    log.warning("checksums run in numpy, several times slower: no compiled %s", LIBRARY)
    return None
