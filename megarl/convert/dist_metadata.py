"""torch's list of what a distributed checkpoint stores where, read without trusting it.

Owns the reading of `.metadata`, a pickle: one of a stranger must not run code, nor name files
elsewhere. Only what torch and Megatron write there is made. Source: torch 2.13,
distributed/checkpoint/{metadata,filesystem}.py.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.serialization import _get_layout

from megarl.convert.formats import METADATA
from megarl.errors import MALFORMED

UNREADABLE = (
    *MALFORMED, OSError, EOFError, RuntimeError, ImportError, AssertionError, MemoryError,
    pickle.UnpicklingError, zipfile.BadZipFile, zlib.error, struct.error,
)  # fmt: skip
"""What reading pickles and archives raises where they are not what was asked for."""

_KNOWN: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (*metadata.__all__, "_MEM_FORMAT_ENCODING")
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
}
_PLANS = ("megatron.", "torch.distributed.checkpoint.")  # where their classes are
_PATHS = ("pathlib", "pathlib._local")  # Python 3.13 has the latter


def read_metadata(folder: Path) -> Metadata:
    """The list of a checkpoint. Raises one of UNREADABLE where it is none."""
    with (folder / METADATA).open("rb") as file:
        found = _Reader(file).load()
    if not isinstance(found, Metadata):
        raise ValueError(f"it holds a {type(found).__name__}")
    for index, stored in found.storage_data.items():
        name = stored.relative_path
        if not isinstance(index, MetadataIndex) or Path(name).name != name or name in ("", ".."):
            raise ValueError(f"{name!r} is no name of a file beside it")
        _check_numbers((stored.offset, stored.length))
    for facts in found.state_dict_metadata.values():
        if isinstance(facts, TensorStorageMetadata):
            _check_numbers(facts.size)
            if not isinstance(facts.properties.dtype, torch.dtype):
                raise ValueError(f"{facts.properties.dtype!r} is no type of numbers")
            for chunk in facts.chunks:
                _check_numbers((*chunk.offsets, *chunk.sizes))
    return found


def _check_numbers(numbers: Sequence[int]) -> None:
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{list(numbers)} are no sizes")


class _Ignored:
    """Stands for plans, which Megatron puts beside the list; nothing of them is used."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


class _Reader(pickle.Unpickler):
    """Makes what is written in a list of tensors, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if module in _PATHS:
            return PurePosixPath
        if module.startswith(_PLANS) and "." not in name:
            return _Ignored
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a list of tensors")
