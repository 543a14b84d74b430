"""What is in a checkpoint, from headers and metadata alone: no weight is read.

Owns the figures and their page. Knows nothing of how a checkpoint is read for other ends.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megarl.actor.parameters import block_table
from megarl.actor.shape import ModelShape, read_shape
from megarl.convert.formats import FORMATS, Found
from megarl.errors import LayoutError, ModelError
from megarl.reshard.dist_checkpoint import (
    dist_checkpoint_layout,
    policy_chunks,
    without_absent_mtp,
)
from megarl.reshard.files import layout_of_headers, read_headers
from megarl.reshard.notation import elided
from megarl.reshard.page import bytes_text, count_text

LABEL = 12


@dataclass(frozen=True, slots=True)
class Contents:
    """Figures of a checkpoint. `problem` says why it is not whole, or not of its config.json.

    `dtypes` are bytes by type; `parts` are bytes of what is there besides the model, by name;
    `version` is the training step or the policy version that it is of, where that is known.
    """

    path: str
    format: str
    architecture: str
    num_parameters: int
    num_tensors: int
    weight_bytes: int
    dtypes: Mapping[str, int]
    files: Mapping[str, int]
    layout: str
    parts: Mapping[str, int] = field(default_factory=dict)
    version: int | None = None
    problem: str = ""

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return asdict(self)


def inspect(found: Found) -> Contents:
    """The contents of a checkpoint. Raises ModelError or CheckpointError where it is broken."""
    return _hugging_face(found) if found.format == "hf" else _torch_dist(found)


def _hugging_face(found: Found) -> Contents:
    headers = read_headers(found.path)
    stored = [tensor for header in headers.values() for tensor in header.values()]
    dtypes: Counter[str] = Counter()
    for tensor in stored:
        dtypes[tensor.dtype] += tensor.end - tensor.start

    def check(shape: ModelShape) -> None:
        layout_of_headers(headers, block_table(shape, shape.fp8_block))

    model, problem = _model(found, check)
    return Contents(
        path=str(found.path),
        format=found.words,
        architecture=model.architecture if model else "",
        num_parameters=_num_parameters(model) or sum(math.prod(t.shape) for t in stored),
        num_tensors=len(stored),
        weight_bytes=sum(dtypes.values()),
        dtypes=dict(dtypes.most_common()),
        files={path.name: path.stat().st_size for path in headers},
        layout="whole tensors",
        problem=problem,
    )


def _torch_dist(found: Found) -> Contents:
    from megarl.convert.dist_files import DistCheckpoint  # which imports torch, for seconds

    stored = DistCheckpoint(found.path)
    chunks = policy_chunks(stored.chunks)
    dtypes: Counter[str] = Counter()
    parts: Counter[str] = Counter()
    for chunk in chunks:
        dtypes[stored.dtype(chunk)] += stored.num_bytes(chunk)
    for chunk in set(stored.chunks) - set(chunks):
        parts[chunk.key.partition(".")[0]] += stored.num_bytes(chunk)

    def check(shape: ModelShape) -> None:
        dist_checkpoint_layout(without_absent_mtp(shape, chunks), chunks)

    model, problem = _model(found, check)
    shapes = {chunk.key: chunk.shape for chunk in chunks}
    return Contents(
        path=str(found.path),
        format=found.words,
        architecture=model.architecture if model else "",
        num_parameters=_num_parameters(model) or sum(map(math.prod, shapes.values())),
        num_tensors=len(shapes),
        weight_bytes=sum(dtypes.values()),
        dtypes=dict(dtypes.most_common()),
        files={
            name: (found.path / name).stat().st_size
            for name in sorted({chunk.file for chunk in stored.chunks})
        },
        layout=f"{len(chunks)} chunks",
        parts=dict(parts),
        version=_version(stored.common()),
        problem=problem,
    )


def _model(found: Found, check: Callable[[ModelShape], None]) -> tuple[ModelShape | None, str]:
    """The model that the config.json describes, and what `check` has against the checkpoint."""
    if found.model is None:
        return None, ""
    shape = None
    try:
        shape = read_shape(found.model)
        check(shape)
    except (ModelError, LayoutError) as error:
        return shape, str(error)
    return shape, ""


def _num_parameters(shape: ModelShape | None) -> int:
    return sum(p.num_elements for p in block_table(shape).parameters) if shape else 0


def _version(common: Mapping[str, Any]) -> int | None:
    """The policy version of a run of megarl, or the iteration of a Megatron-LM's."""
    ours = common.get("common")
    found = ours.get("version") if isinstance(ours, Mapping) else common.get("iteration")
    return found if isinstance(found, int) else None


def page(contents: Contents) -> str:
    """The figures in a few lines."""
    dtypes = ", ".join(f"{bytes_text(size)} {name}" for name, size in contents.dtypes.items())
    names = list(contents.files)
    files = f"{len(names)}, {bytes_text(sum(contents.files.values()))}: {', '.join(elided(names))}"
    beside = ", ".join(f"{name} {bytes_text(size)}" for name, size in contents.parts.items())
    lines = {
        "path": contents.path,
        "format": f"{contents.format}, {contents.layout}",
        "model": contents.architecture or "unknown; name its Hugging Face folder with --model",
        "parameters": f"{count_text(contents.num_parameters)}, in {contents.num_tensors} tensors",
        "weights": dtypes,
        "files": files,
        "besides": beside or ("" if contents.format == FORMATS["hf"] else "no optimizer"),
        "version": "" if contents.version is None else str(contents.version),
        "problem": contents.problem,
    }
    return "".join(f"{name:<{LABEL}}{text}\n" for name, text in lines.items() if text)
