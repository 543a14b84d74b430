"""A checkpoint, opened: its model, its layout, and the bits of each tensor, read from its files.

Owns what both formats have in common for those who read them. Knows nothing of writing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from megarl.actor.config_fields import read_json
from megarl.actor.parameters import SCALE_SUFFIX, block_table
from megarl.actor.shape import ModelShape, read_shape
from megarl.convert.dist_files import DistCheckpoint
from megarl.convert.formats import CONFIG, Found
from megarl.convert.stored import Dequantized, Stored, stored_in
from megarl.errors import CheckpointError
from megarl.float8 import BlockScaling
from megarl.reshard.dist_checkpoint import (
    chunk_files,
    dist_checkpoint_layout,
    place,
    policy_chunks,
    without_absent_mtp,
)
from megarl.reshard.files import (
    FLOAT8,
    STORED,
    StoredTensor,
    layout_of_headers,
    read_headers,
)
from megarl.reshard.layout import Layout
from megarl.reshard.shard_files import TensorToStore, shard_files

Headers = Mapping[Path, Mapping[str, StoredTensor]]


@dataclass(eq=False)
class Checkpoint:
    """A checkpoint of `shape`: rank i of `layout` is `files[i]`.

    `dtypes[i]` has the type of each of its local tensors, as safetensors spells it; `tensor(i,
    name)` its bits, of numpy's type in `reshard.files.STORED`. `fp8_block` is that of its float8
    tensors, None also where they are dequantized here.
    """

    found: Found
    shape: ModelShape
    layout: Layout
    files: tuple[Path, ...]
    dtypes: tuple[Mapping[str, str], ...]
    fp8_block: tuple[int, int] | None
    load: Callable[[int, str], Stored]
    dist: DistCheckpoint | None = None  # where it is a torch_dist one
    _known: dict[tuple[int, str], Stored] = field(default_factory=dict)

    def tensor(self, rank: int, name: str) -> Stored:
        """The bits of a rank's local tensor, to be read; its checksum is read at the first call."""
        key = (rank, name)
        if key not in self._known:
            self._known[key] = self.load(rank, name)
        return self._known[key]

    def parameter_dtypes(self) -> dict[str, str]:
        """The type of each parameter, as it is read; several are joined by +."""
        found: dict[str, set[str]] = {}
        for rank, dtypes in enumerate(self.dtypes):
            for piece in self.layout.rank(rank).pieces:
                found.setdefault(piece.tensor, set()).add(dtypes[piece.local])
        return {p.name: "+".join(sorted(found[p.name])) for p in self.layout.parameters}


def open_checkpoint(found: Found, dequantized: str | None = None) -> Checkpoint:
    """The checkpoint that was found. With `dequantized` float8 tensors are read as that type.

    Raises ModelError, LayoutError and CheckpointError where it is not whole or not of its
    config.json, and CheckpointError where there is no config.json.
    """
    if found.model is None:
        raise CheckpointError(
            f"{found.path} has no config.json beside it; name the Hugging Face folder of its "
            "model with --model"
        )
    if found.format == "hf":
        headers = read_headers(found.path)
        return _open_hugging_face(found, headers, read_shape(found.path), dequantized)
    return _open_torch_dist(found, replace(read_shape(found.model), fp8_block=None))


def expected_checkpoint(folder: Path, dequantized: str | None = None) -> Checkpoint:
    """What a Hugging Face folder that has only a config.json would hold. No tensor can be read.

    Raises ModelError where that is missing or of no model that is known.
    """
    shape = read_shape(folder)
    config = read_json(folder / CONFIG, required=True)
    named = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    policy = {"float32": "F32", "float16": "F16"}.get(named, "BF16")
    by_precision = {"policy": policy, "float32": "F32", "float8": FLOAT8}
    tensors = {
        name: TensorToStore(by_precision[p.precision], p.shape[1:] if p.stacked else p.shape)
        for p in block_table(shape, shape.fp8_block).parameters
        for name in p.stored_names()
    }
    headers = {folder / file.name: file.tensors for file in shard_files(tensors)}
    return _open_hugging_face(Found("hf", folder, folder), headers, shape, dequantized)


def _open_hugging_face(
    found: Found, headers: Headers, shape: ModelShape, dequantized: str | None
) -> Checkpoint:
    if not any(f"model.layers.{shape.num_layers}." in name for h in headers.values() for name in h):
        shape = replace(shape, num_mtp_layers=0)
    block = shape.fp8_block
    layout = layout_of_headers(headers, block_table(shape, block))
    scales = _scales(headers)
    if block is not None and dequantized is not None:
        headers = _dequantized(headers, dequantized)
        layout = layout_of_headers(headers, block_table(shape))
    paths = tuple(headers)

    def load(rank: int, name: str) -> Stored:
        path, stored = paths[rank], headers[paths[rank]][name]
        scale = name + SCALE_SUFFIX
        if block is None or dequantized is None or scale not in scales:
            return stored_in(path, stored)
        codes = stored_in(path, replace(stored, dtype=FLOAT8))
        where, scale_stored = scales[scale]
        scaling = BlockScaling(*block)
        return Dequantized(codes, stored_in(where, scale_stored), scaling, dequantized)

    held = tuple({t.name for t in layout.rank(rank).tensors} for rank in range(len(paths)))
    dtypes = tuple(
        {name: stored.dtype for name, stored in headers[path].items() if name in names}
        for path, names in zip(paths, held, strict=True)
    )
    left = None if dequantized is not None else block
    return Checkpoint(found, shape, layout, paths, dtypes, left, load)


def _scales(headers: Headers) -> dict[str, tuple[Path, StoredTensor]]:
    """Where the scales of float8 tensors are, which need not be in the file of the tensor."""
    return {
        name: (path, stored)
        for path, header in headers.items()
        for name, stored in header.items()
        if name.endswith(SCALE_SUFFIX)
    }


def _dequantized(headers: Headers, dtype: str) -> Headers:
    """The headers as they were if float8 tensors were stored as `dtype`, without scales."""
    return {
        path: {
            name: replace(stored, dtype=dtype) if stored.dtype == FLOAT8 else stored
            for name, stored in header.items()
            if not name.endswith(SCALE_SUFFIX)
        }
        for path, header in headers.items()
    }


def _open_torch_dist(found: Found, shape: ModelShape) -> Checkpoint:
    stored = DistCheckpoint(found.path)
    chunks = policy_chunks(stored.chunks)
    shape = without_absent_mtp(shape, chunks)
    for chunk in chunks:
        if stored.dtype(chunk) not in STORED:
            raise CheckpointError(
                f"{found.path}: {chunk.key} is stored as {stored.dtype(chunk)}; use a checkpoint "
                "of float32, float16 or bfloat16"
            )
    layout = dist_checkpoint_layout(shape, chunks)
    files = chunk_files(chunks)
    by_place = {(chunk.file, place(chunk).local): chunk for chunk in chunks}
    dtypes: dict[str, dict[str, str]] = {file: {} for file in files}
    for (file, local), chunk in by_place.items():
        dtypes[file][local] = stored.dtype(chunk)

    def load(rank: int, name: str) -> Stored:
        chunk = by_place[files[rank], name]
        return stored.stored(chunk).reshaped(place(chunk).shape)

    paths = tuple(found.path / file for file in files)
    return Checkpoint(found, shape, layout, paths, tuple(dtypes.values()), None, load, stored)
