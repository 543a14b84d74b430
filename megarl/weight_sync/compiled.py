"""The checksum's inner loop in C, where setup.py could compile it.

Owns finding and calling the library that is made of `sums.c`. Without it (no C compiler at install)
`checksum` does the same in numpy, several times slower. Calls release Python's lock.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

log = logging.getLogger(__name__)

LIBRARY = "_sums"
_NAMES = {1: "megarl_sum_u8", 2: "megarl_sum_u16", 4: "megarl_sum_u32"}

# R runs, L elements of a run
Sum = Callable[[npt.NDArray[np.unsignedinteger], npt.NDArray[np.uint64], int], int]


@functools.cache
def find() -> Sum | None:
    """The compiled `sum_runs(rows [R, L], starts [R], identity)`; None where it was not built.

    Every row is contiguous; rows may lie apart.
    """
    folder = Path(__file__).parent
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"{LIBRARY}{suffix}"
        if path.is_file():
            try:
                return load(path)
            except (OSError, AttributeError) as error:
                log.warning("compiled checksum not usable path=%s error=%s", path, error)
    log.warning("checksums run in numpy, several times slower: no compiled %s", LIBRARY)
    return None


def load(path: Path) -> Sum:
    """The function in the library at `path`. Raises OSError or AttributeError where it is not."""
    library = ctypes.CDLL(str(path))
    functions = {}
    for itemsize, name in _NAMES.items():
        function = getattr(library, name)
        function.restype = ctypes.c_uint64
        function.argtypes = (
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_size_t,
            ctypes.c_ssize_t,
            ctypes.c_void_p,
            ctypes.c_uint64,
        )
        functions[itemsize] = function

    def sum_runs(
        rows: npt.NDArray[np.unsignedinteger], starts: npt.NDArray[np.uint64], identity: int
    ) -> int:
        num_runs, length = rows.shape
        assert starts.shape == (num_runs,) and starts.flags.c_contiguous
        assert length < 2 or rows.strides[1] == rows.itemsize
        total: int = functions[rows.itemsize](
            rows.ctypes.data,
            num_runs,
            length,
            rows.strides[0] // rows.itemsize,
            starts.ctypes.data,
            identity,
        )
        return total

    return sum_runs
