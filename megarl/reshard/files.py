"""A Hugging Face checkpoint of safetensors files as a layout: each file is a rank.

Owns the safetensors header (github.com/huggingface/safetensors#format) and every check that a
checkpoint is whole. Reads headers only; `map_tensors` maps the data, so that executing a plan reads
just the slices that the plan names.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.actor.config_fields import is_integer, shown
from megarl.actor.parameters import HEAD_NAME, SCALE_SUFFIX, BlockTable, Parameter
from megarl.errors import MALFORMED, ModelError
from megarl.reshard.explicit import explicit_layout
from megarl.reshard.layout import Layout, LocalTensor, Piece, RankLayout, whole

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors reference implementation

# numpy has no bfloat16 and no float8: their bits are mapped as unsigned integers.
FLOATS: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
FLOAT8 = "F8_E4M3"  # of a block-quantized weight; its scales are a tensor of their own
STORED: Mapping[str, np.dtype[Any]] = {**FLOATS, FLOAT8: np.dtype("u1")}

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
        if not os.path.isfile(folder / name):
            raise ModelError(f"{folder / name} is missing but {INDEX} names it; fetch it again")
    return tuple(folder / name for name in names)


def checkpoint_layout(model_dir: str | Path, table: BlockTable) -> Layout:
    """The layout of the checkpoint's files: rank i is `checkpoint_files(model_dir)[i]`.

    Raises ModelError where a file is missing, truncated or not safetensors, and as
    `layout_of_headers` does.
    """
    return layout_of_headers(read_headers(model_dir), table)


def read_headers(model_dir: str | Path) -> dict[Path, dict[str, StoredTensor]]:
    """The tensors of each of the checkpoint's files, files and tensors sorted by name.

    Raises ModelError where a file is missing, truncated or not safetensors.
    """
    return {path: dict(sorted(read_header(path).items())) for path in checkpoint_files(model_dir)}


def policy_headers(
    model_dir: str | Path, stored: BlockTable, policy: BlockTable
) -> dict[Path, dict[str, StoredTensor]]:
    """`read_headers` without tensors of `stored`, the whole model, that the policy does not have.

    Those are its layers for multi-token prediction, which may be absent too.
    """
    beyond = set(stored.duplicates) - set(policy.duplicates)
    for parameter in set(stored.parameters) - set(policy.parameters):
        beyond.update(parameter.stored_names())
    return {
        path: {name: tensor for name, tensor in header.items() if name not in beyond}
        for path, header in read_headers(model_dir).items()
    }


def layout_of_headers(
    headers: Mapping[Path, Mapping[str, StoredTensor]], table: BlockTable
) -> Layout:
    """The layout of files whose headers are read: rank i is the i-th. An expert is a tensor.

    Raises ModelError where a parameter is missing, stored twice, of another shape, or quantized
    where the table's is not and the other way round, and where a tensor is not of this model.
    """
    wanted = {
        name: (parameter, expert if parameter.stacked else None)
        for parameter in table.parameters
        for expert, name in enumerate(parameter.stored_names())
    }
    copies = _copies(table)
    found: dict[str, Path] = {}
    ranks = []
    for rank, (path, header) in enumerate(headers.items()):
        tensors, pieces = [], []
        for name, stored in header.items():
            if name in wanted:
                parameter, expert = wanted[name]
                _check_tensor(path, name, parameter, stored, found)
                found[name] = path
                tensors.append(LocalTensor(name, stored.shape))
                lead = () if expert is None else ((expert, expert + 1),)
                box = (*lead, *whole(stored.shape))
                pieces.append(Piece(parameter.name, box, name, (0,) * len(stored.shape)))
            elif name in copies:
                _check_shape(path, name, copies[name].shape, stored)
            elif not name.endswith(IGNORED_SUFFIXES):
                raise _unknown(path, name, table)
        ranks.append(RankLayout(rank, tuple(tensors), tuple(pieces)))
    missing = [name for name in wanted if name not in found]
    if missing:
        folders = ", ".join(sorted({str(path.parent) for path in headers}))
        raise ModelError(
            f"{folders}: {len(missing)} of {len(wanted)} tensors are in none of its files, the "
            f"first is {missing[0]}; fetch the checkpoint again"
        )
    names = [path.name for path in headers]
    shown = ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]}"
    return explicit_layout(f"files {shown}", table, ranks)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name. Raises ModelError where the file is not whole."""
    try:
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
        header = json.loads(raw, object_pairs_hook=_without_repetition)
        entries = {
            name: _stored(name, entry, 8 + length)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}; make the file readable") from error
    except MALFORMED as error:
        raise ModelError(
            f"{path} has a broken safetensors header: {str(error)[:200]}; fetch the file again"
        ) from error
    _check_extents(path, entries, size)
    return entries


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a header, in which no name may stand twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands in it twice")
    return found


def _stored(name: str, entry: Mapping[str, Any], data: int) -> StoredTensor:
    """One entry of a header whose file has its data from byte `data` on."""
    dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = (*shape, start, end)
    if not isinstance(dtype, str) or not all(is_integer(n) and n >= 0 for n in numbers):
        raise ValueError(f"{name} is no tensor: {shown(entry)}")
    name.encode()  # half a surrogate pair, which JSON can have, is no text: a ValueError
    return StoredTensor(dtype, tuple(shape), data + start, data + end)


def _check_extents(path: Path, entries: Mapping[str, StoredTensor], size: int) -> None:
    """Raise ModelError where a tensor's bytes are not its own, or not as many as it has."""
    last_name, last_end = "", 0
    for name, stored in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if stored.start < last_end:
            raise ModelError(
                f"{path} has a broken safetensors header: {name} begins within {last_name}; fetch "
                "the file again"
            )
        last_name, last_end = name, max(last_end, stored.end)
        if stored.end > size:
            raise ModelError(
                f"{path} is truncated: {name} ends at byte {stored.end}, the file at {size}; "
                "fetch it again"
            )
        itemsize = STORED[stored.dtype].itemsize if stored.dtype in STORED else None
        if itemsize and stored.end - stored.start != math.prod(stored.shape) * itemsize:
            raise ModelError(
                f"{path}: {name} has {stored.end - stored.start} bytes for shape {stored.shape} of "
                f"{stored.dtype}; fetch it again"
            )


def map_tensors(
    path: Path, header: Mapping[str, StoredTensor] | None = None
) -> dict[str, np.ndarray[Any, Any]]:
    """The file's tensors, mapped read-only: float32, float16, and other types as their bits.

    bfloat16 is mapped as uint16, float8_e4m3fn as uint8. `header` is the file's, where it is read
    already.
    """
    return {
        name: np.memmap(path, STORED[stored.dtype], "r", stored.start, stored.shape)
        for name, stored in (read_header(path) if header is None else header).items()
        if stored.dtype in STORED
    }


def _weight_map(folder: Path) -> Mapping[str, str]:
    path = folder / INDEX
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(n, str) and Path(n).name == n for n in weight_map.values()):
            raise TypeError("weight_map must map tensor names to names of files beside it")
    except (OSError, *MALFORMED) as error:
        raise ModelError(f"{path} is broken: {error!r}; fetch it again") from error
    return dict(weight_map)


def _check_tensor(
    path: Path, name: str, parameter: Parameter, stored: StoredTensor, found: Mapping[str, Path]
) -> None:
    if name in found:
        raise ModelError(f"{name} is in both {found[name]} and {path}; remove the file left over")
    _check_shape(path, name, parameter.shape[1:] if parameter.stacked else parameter.shape, stored)
    if parameter.precision == "float8":
        if stored.dtype != FLOAT8:
            raise ModelError(
                f"{path}: {name} is stored as {stored.dtype}, the quantization_config of "
                f"config.json makes it {FLOAT8}; weights and config.json do not belong together"
            )
    elif stored.dtype not in FLOATS:
        reason = "without a quantization_config that says so, " if stored.dtype == FLOAT8 else ""
        raise ModelError(
            f"{path}: {name} is stored as {stored.dtype}; {reason}use a checkpoint in "
            f"{', '.join(FLOATS)}"
        )


def _check_shape(path: Path, name: str, shape: tuple[int, ...], stored: StoredTensor) -> None:
    if stored.shape != shape:
        raise ModelError(
            f"{path}: {name} has shape {list(stored.shape)}, config.json makes it "
            f"{list(shape)}; weights and config.json do not belong together"
        )


def _copies(table: BlockTable) -> dict[str, Parameter]:
    """Known second copies of a parameter, by name, with the parameter that they are a copy of."""
    ends = {
        parameter.kind: parameter
        for kind in ("embedding", "head")
        for parameter in table.kinds.get(kind, ())
    }
    copies = {}
    if "head" not in ends and "embedding" in ends:
        copies[HEAD_NAME] = ends["embedding"]  # a tied head is the embedding's second name
    if "embedding" in ends:  # they repeat it or the head, whose shapes are equal
        copies |= dict.fromkeys(table.duplicates, ends["embedding"])
    return copies


def _unknown(path: Path, name: str, table: BlockTable) -> ModelError:
    """The error for a tensor that is no parameter."""
    layers = [block.layer for block in table.blocks if block.layer is not None]
    number = re.match(r"model\.layers\.(\d+)\.", name)
    if number and layers and int(number[1]) > max(layers):
        return ModelError(
            f"{path}: tensor {name} is of layer {number[1]}, and config.json describes layers 0 to "
            f"{max(layers)}; if it is a layer for multi-token prediction, set config.json's "
            "num_nextn_predict_layers to how many there are, or remove these tensors from the "
            "checkpoint"
        )
    if name.endswith(SCALE_SUFFIX):
        return ModelError(
            f"{path}: {name} has the scales of a {FLOAT8} weight, of which config.json says "
            "nothing; fetch the config.json that has their quantization_config"
        )
    return ModelError(
        f"{path}: tensor {name} is not a parameter of the model that config.json describes; "
        "weights and config.json do not belong together"
    )
