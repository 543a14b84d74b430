"""One checkpoint made from another: formats, files and types of numbers, as a whole or not at all.

Owns what is converted to what, and the order of the work. The plan from the source's layout to the
target's says what goes where; workers assemble and write the target's files.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megarl import __version__
from megarl.actor.parameters import Parameter
from megarl.convert.assemble import assembled
from megarl.convert.digests import check_digests
from megarl.convert.formats import (
    BACKEND,
    CONFIG,
    FORMATS,
    LATEST,
    METADATA,
    Format,
    Found,
    find,
)
from megarl.convert.huggingface import HuggingFaceTarget
from megarl.convert.journal import Journal, check_free
from megarl.convert.kept import Kept, keep
from megarl.convert.opened import Checkpoint, expected_checkpoint, open_checkpoint
from megarl.convert.progress import Progress
from megarl.convert.target import Target, Tell
from megarl.convert.torch_dist import TorchDistTarget
from megarl.convert.workers import write_all
from megarl.errors import CheckpointError
from megarl.float8 import BlockScaling
from megarl.reshard.dist_checkpoint import Chunk
from megarl.reshard.files import FLOAT8, INDEX, SINGLE
from megarl.reshard.notation import counted, elided
from megarl.reshard.page import bytes_text, seconds_text
from megarl.reshard.plan import Plan, make_plan

Numbers = Literal["fp32", "fp16", "bf16", "fp8"]
SPELLED: dict[str, str] = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
SHOWN = 16  # files of a dry run
MEASURED_BYTES_PER_S = 300e6  # the slower way in docs/benchmarks.md, its start included
BESIDE_FLOAT8 = "BF16"  # of what is not quantized, where float8 is asked for; and of float8 read


@dataclass(frozen=True, slots=True)
class Options:
    """What is wanted. `dtype` None keeps the numbers as they are, but float8 in torch_dist."""

    to: Format | None = None
    dtype: Numbers | None = None
    model: Path | None = None
    file_bytes: int = 5_000_000_000
    workers: int = 1
    optimizer: bool = True  # kept where both sides are torch_dist
    digests: Path | None = None  # a list that the source's files of weights are checked against


@dataclass(frozen=True)
class Conversion:
    """What is to be done: from `source` to `target`, by `plan`."""

    source: Checkpoint
    target: Target
    plan: Plan
    to: Format
    options: Options

    @property
    def num_bytes(self) -> int:
        """Bytes to write."""
        return sum(file.num_bytes for file in self.target.files)


def prepare(path: str | Path, options: Options, is_dry: bool = False) -> Conversion:
    """Read and check the source, and plan its conversion; no weight is read yet.

    With `is_dry` a folder with nothing but a config.json does: it stands for that model. Raises
    CheckpointError, ModelError or LayoutError where the source is not whole, not of its
    config.json, or cannot be had as is wanted.
    """
    expected = is_dry and _has_config_only(Path(path))
    found = Found("hf", Path(path), Path(path)) if expected else find(path, options.model)
    to: Format = options.to or ("hf" if found.format == "torch_dist" else "torch_dist")
    if to == "torch_dist" and options.dtype == "fp8":
        raise CheckpointError(
            "Megatron keeps no float8 in torch_dist checkpoints; use --dtype bf16, or --to hf"
        )
    as_stored = to == "hf" and options.dtype in (None, "fp8")
    wanted = SPELLED.get(options.dtype or "", BESIDE_FLOAT8)
    dequantized = None if as_stored else wanted
    if expected:
        source = expected_checkpoint(found.path, dequantized)
    else:
        source = open_checkpoint(found, dequantized)
    target = _target(source, to, options)
    plan = make_plan(source.layout, target.layout, policy_bytes=4)
    return Conversion(source, target, plan, to, options)


def _has_config_only(folder: Path) -> bool:
    names = (SINGLE, INDEX, METADATA, BACKEND, LATEST)
    return (folder / CONFIG).is_file() and not any((folder / name).exists() for name in names)


def _target(source: Checkpoint, to: Format, options: Options) -> Target:
    shape = replace(source.shape, fp8_block=source.fp8_block)
    stored = source.parameter_dtypes()
    dtypes = {p.name: _dtype(p, stored[p.name], options) for p in source.layout.parameters}
    assert source.found.model is not None
    if to == "torch_dist":
        dist = source.dist if options.optimizer else None

        def kept(model: Sequence[Chunk]) -> Kept | None:
            return keep(dist, source.found.path, model) if dist is not None else None

        return TorchDistTarget(shape, dtypes, source.found.model, options.file_bytes, kept)
    quantize = BlockScaling() if options.dtype == "fp8" and shape.fp8_block is None else None
    return HuggingFaceTarget(shape, dtypes, source.found.model, options.file_bytes, quantize)


def _dtype(parameter: Parameter, stored: str, options: Options) -> str:
    """The type that a parameter is assembled in."""
    if parameter.precision == "float8":
        return FLOAT8
    if parameter.precision == "float32" and options.dtype is not None:
        return "F32"
    if options.dtype is not None and not (options.dtype == "fp8" and parameter.quantized):
        return SPELLED.get(options.dtype, BESIDE_FLOAT8)
    if "+" in stored:
        raise CheckpointError(
            f"{parameter.name} has tensors of {stored}; give one type with --dtype"
        )
    return stored


def describe(work: Conversion, final: Path) -> str:
    """What would be written, and about how long that takes."""
    lines = [
        f"{work.source.found.path} ({work.source.found.words}) -> {final} ({FORMATS[work.to]})",
        f"{counted(len(work.target.files), 'file')}, {bytes_text(work.num_bytes)}:",
    ]
    files = [f"  {file.name}  {bytes_text(file.num_bytes)}" for file in work.target.files]
    lines += elided(files, SHOWN)
    lines.append(
        f"about {_duration(work.num_bytes / MEASURED_BYTES_PER_S)} at "
        f"{bytes_text(MEASURED_BYTES_PER_S)}/s, the rate that was measured on 2 cores "
        "(docs/benchmarks.md); here the disk decides"
    )
    return "\n".join(lines) + "\n"


def _duration(seconds: float) -> str:
    """A time that may be long.

    >>> _duration(7.04), _duration(600), _duration(7000)
    ('7.04 s', '10.0 min', '1.9 h')
    """
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.1f} {unit}"
    return seconds_text(seconds)


def convert(work: Conversion, final: Path) -> str:
    """Write the target to the folder `final`; a sentence on it.

    The folder is there when it is whole, and not before. What an earlier try has written is kept.
    Raises CheckpointError where something is in the way, space is lacking, or a file cannot be
    written.
    """
    begun = time.monotonic()
    check_free(final)
    if work.options.digests is not None:
        check_digests(work.source.files, work.options.digests, work.options.workers)
    _check_space(final.parent, work.num_bytes - _present(final))
    facts = _facts(work)
    try:
        journal = Journal(final, facts)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or final.parent}: {error.strerror}; {final.parent} must be a folder "
            "that can be written to"
        ) from error
    try:
        kept = len(journal.receipts)
        if not journal.is_whole:
            _write(work, journal)
        if _facts(work) != facts:
            raise CheckpointError(
                f"{work.source.found.path} has changed while it was converted; give the same "
                "command again when nobody writes there"
            )
        journal.finish()
    except OSError as error:
        raise CheckpointError(f"{error.filename or final}: {error.strerror}; {_AGAIN}") from error
    finally:
        journal.close()
    took_s = time.monotonic() - begun
    again = f", {kept} of them from an earlier try" if kept else ""
    files = counted(len(work.target.files), "file")
    return f"{final}: {files}, {bytes_text(work.num_bytes)}{again}, in {seconds_text(took_s)}\n"


_AGAIN = "the same command goes on where it stopped"


def _write(work: Conversion, journal: Journal) -> None:
    files = work.target.files
    left = [number for number, file in enumerate(files) if file.name not in journal.receipts]
    done = work.num_bytes - sum(files[number].num_bytes for number in left)

    def write(number: int, tell: Tell) -> Any:
        path = journal.folder / files[number].name
        try:
            tensors = assembled(work.source, work.target, work.plan, number)
            return work.target.write(journal.folder, number, tensors, tell)
        except OSError as error:
            path.unlink(missing_ok=True)  # what is there of it takes space
            raise CheckpointError(
                f"{path}: cannot be written ({error.strerror}); with space and rights {_AGAIN}"
            ) from error

    progress = Progress(work.num_bytes, done)
    for number, receipt in write_all(left, work.options.workers, write, progress):
        journal.add(files[number].name, receipt)
    work.target.finish(journal.folder, [journal.receipts[file.name] for file in files])


def _present(final: Path) -> int:
    """Bytes that an earlier try has written."""
    partial = final.with_name(final.name + ".partial")
    return sum(path.stat().st_size for path in partial.glob("*") if path.is_file())


def _check_space(parent: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(parent).free
    if num_bytes > free:
        raise CheckpointError(
            f"{parent} has {bytes_text(free)} free, and {bytes_text(num_bytes)} are to be written; "
            "free some, or write elsewhere"
        )


def _facts(work: Conversion) -> dict[str, Any]:
    """What tells this conversion from others: the source as it is now, and what is made of it."""
    files, options = {*work.source.files}, work.options
    if work.source.dist:
        folder = work.source.found.path
        files |= {folder / METADATA, *(folder / chunk.file for chunk in work.source.dist.chunks)}
    stats = [(path.name, path.stat()) for path in sorted(files)]
    return {
        "source": os.path.realpath(work.source.found.path),
        "source_files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats],
        "to": work.to,
        "dtype": options.dtype,
        "files": [[file.name, file.num_bytes] for file in work.target.files],
        "target": work.target.layout.digest,
        "megarl": __version__,
    }
