"""A Hugging Face checkpoint of safetensors files as a layout: each file is a rank.

Owns the safetensors header (github.com/huggingface/safetensors#format) and every check that a
checkpoint is whole. Reads headers only; `map_tensors` maps the data, so that executing a plan reads
just the slices that the plan names.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.actor.parameters import Parameter
from megarl.errors import ModelError
from megarl.reshard.layout import Layout, LocalTensor, Piece, RankLayout, whole

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors reference implementation

# numpy has no bfloat16: its bits are mapped as uint16.
STORED: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}

# Tensors that published checkpoints carry and that no engine loads.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file: `dtype` as safetensors spells it, its bytes at [start, end) of it."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def checkpoint_files(model_dir: str | Path) -> tuple[Path, ...]:
    """The weight files of a checkpoint, sorted by name: the ranks of its layout, in order.

    Raises ModelError where there are none, or a file that the index names is missing.
    """
    folder = Path(model_dir)
    if (folder / INDEX).is_file():
        names = sorted(set(_weight_map(folder).values()))
    elif (folder / SINGLE).is_file():
        names = [SINGLE]
    else:
        raise ModelError(
            f"{folder} has neither {SINGLE} nor {INDEX}; set actor.model to a folder with a "
            "checkpoint in safetensors format"
        )
    for name in names:
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name} is missing but {INDEX} names it; fetch it again")
    return tuple(folder / name for name in names)


def checkpoint_layout(model_dir: str | Path, parameters: tuple[Parameter, ...]) -> Layout:
    """The layout of the checkpoint's files: rank i is `checkpoint_files(model_dir)[i]`.

    Raises ModelError where a file is missing, truncated or not safetensors, where a parameter is
    missing, stored twice, of another shape or quantized, and where a tensor is not of this model.
    """
    folder = Path(model_dir)
    files = checkpoint_files(folder)
    wanted = {parameter.name: parameter for parameter in parameters}
    found: dict[str, Path] = {}
    ranks = []
    for rank, path in enumerate(files):
        tensors, pieces = [], []
        for name, stored in sorted(read_header(path).items()):
            if name in wanted:
                _check_tensor(path, wanted[name], stored, found)
                found[name] = path
                tensors.append(LocalTensor(name, stored.shape))
                zeros = (0,) * len(stored.shape)
                pieces.append(Piece(name, whole(stored.shape), name, zeros))
            elif not _may_be_ignored(name, wanted):
                raise ModelError(
                    f"{path}: tensor {name} is not a parameter of the model that config.json "
                    "describes; weights and config.json do not belong together"
                )
        ranks.append(RankLayout(rank, tuple(tensors), tuple(pieces)))
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ModelError(
            f"{folder}: {len(missing)} of {len(wanted)} tensors are in none of its files, the "
            f"first is {missing[0]}; fetch the checkpoint again"
        )
    return Layout(f"files {', '.join(path.name for path in files)}", parameters, tuple(ranks))


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name. Raises ModelError where the file is not whole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
            raise ModelError(
                f"{path} is not a whole safetensors file: {size} bytes cannot hold a header of "
                f"{length}; fetch it again"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw)
        entries = {
            name: StoredTensor(
                str(entry["dtype"]),
                tuple(int(n) for n in entry["shape"]),
                *(8 + length + int(offset) for offset in entry["data_offsets"]),
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} has a broken safetensors header: {error}") from error
    for name, stored in entries.items():
        if stored.end > size:
            raise ModelError(
                f"{path} is truncated: {name} ends at byte {stored.end}, the file at {size}; "
                "fetch it again"
            )
        itemsize = STORED[stored.dtype].itemsize if stored.dtype in STORED else None
        count = int(np.prod(stored.shape, dtype=np.int64))
        if itemsize and stored.end - stored.start != count * itemsize:
            raise ModelError(
                f"{path}: {name} has {stored.end - stored.start} bytes for shape {stored.shape} of "
                f"{stored.dtype}; fetch it again"
            )
    return entries


def map_tensors(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The file's tensors, mapped read-only: float32, float16, and bfloat16 as uint16 bits."""
    return {
        name: np.memmap(path, STORED[stored.dtype], "r", stored.start, stored.shape)
        for name, stored in read_header(path).items()
        if stored.dtype in STORED
    }


def _weight_map(folder: Path) -> Mapping[str, str]:
    path = folder / INDEX
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(name, str) for name in weight_map.values()):
            raise TypeError("weight_map must map tensor names to file names")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is broken: {error!r}; fetch it again") from error
    return dict(weight_map)


def _check_tensor(
    path: Path, parameter: Parameter, stored: StoredTensor, found: Mapping[str, Path]
) -> None:
    name = parameter.name
    if name in found:
        raise ModelError(f"{name} is in both {found[name]} and {path}; remove the file left over")
    if stored.shape != parameter.shape:
        raise ModelError(
            f"{path}: {name} has shape {list(stored.shape)}, config.json makes it "
            f"{list(parameter.shape)}; weights and config.json do not belong together"
        )
    if stored.dtype not in STORED:
        raise ModelError(
            f"{path}: {name} is stored as {stored.dtype}; use a checkpoint in {', '.join(STORED)}"
        )


def _may_be_ignored(name: str, wanted: Mapping[str, Parameter]) -> bool:
    tied_head = name == "lm_head.weight"  # a tied head is a second name of the embedding
    return name.endswith(IGNORED_SUFFIXES) or (tied_head and name not in wanted)
