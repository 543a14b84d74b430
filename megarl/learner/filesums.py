"""The list of a checkpoint's files with their sizes and digests, so that damage to one is noticed.

Owns `files.json` and the comparison with it. Ranks share the reading. Knows nothing of tensors:
Megatron's format has no checksums, and would load a flipped bit as a weight.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from megarl.durable import sync_path

FILES = "files.json"
UNREADABLE = "unreadable: "  # in the place of a digest


def file_digest(path: Path) -> str:
    """Size in bytes and SHA-256 of a file, or why it cannot be read."""
    try:
        with path.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        return f"{path.stat().st_size} {found}"
    except OSError as error:
        return f"{UNREADABLE}{error.strerror}"


def digests(folder: Path, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """The digest of each file of `folder` by name, the same on every rank. Collective.

    `known` are those of files that this rank has read already; the others are read.
    """
    parts: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, dict(known or {}))
    found = {name: text for part in parts for name, text in part.items()}
    others = sorted({path.name for path in folder.iterdir()} - found.keys())
    return dict(sorted((found | _shared_digests(folder, others)).items()))


def write_digests(folder: Path, found: Mapping[str, str]) -> None:
    """Write what `digests` found, and have the disk take all of it. On one rank.

    Raises OSError, also where something could not be read back: it is no whole checkpoint.
    """
    for name, text in found.items():
        if text.startswith(UNREADABLE):
            raise OSError(errno.EIO, f"{name} is {text}", str(folder / name))
    (folder / FILES).write_text(json.dumps(dict(found), indent=1) + "\n")
    for path in (*folder.iterdir(), folder):
        sync_path(path)


def damage(folder: Path) -> str:
    """How the files are not those of `files.json`, the same on every rank; "" where they are.

    Collective over all ranks.
    """
    told: list[dict[str, str] | str] = [""]
    if dist.get_rank() == 0:
        try:
            told = [dict(json.loads((folder / FILES).read_text()))]
        except (OSError, ValueError, TypeError) as error:
            told = [f"{folder / FILES}: cannot be read ({error})"]
    dist.broadcast_object_list(told, src=0)
    wanted = told[0]
    if isinstance(wanted, str):
        return wanted
    found = _shared_digests(folder, sorted(wanted))
    damaged = [name for name, text in found.items() if text != wanted[name]]
    if not damaged:
        return ""
    name = damaged[0]
    return (
        f"{folder}: {len(damaged)} of {len(wanted)} files are not as they were saved, first "
        f"{name}: {found[name]}, saved: {wanted[name]} (bytes and SHA-256)"
    )


def _shared_digests(folder: Path, names: list[str]) -> dict[str, str]:
    """Digests of the files named by rank 0, in that order; each rank reads its share of them."""
    told = [names]
    dist.broadcast_object_list(told, src=0)  # listings of a network file system may differ
    (names,) = told
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    mine = {name: file_digest(folder / name) for name in names[rank::num_ranks]}
    parts: list[dict[str, str]] = [{} for _ in range(num_ranks)]
    dist.all_gather_object(parts, mine)
    found = {name: text for part in parts for name, text in part.items()}
    return {name: found[name] for name in names}
