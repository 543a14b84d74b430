"""A source's files against a list of SHA-256 digests: safetensors has no checksum of its own.

Owns the form of the list, which is that of `sha256sum`, and the comparison.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from megarl.convert.progress import Progress
from megarl.convert.target import Tell
from megarl.convert.workers import write_all
from megarl.errors import CheckpointError

_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
READ_BYTES = 1 << 21


def check_digests(files: Sequence[Path], listed: Path, workers: int) -> None:
    """Raise CheckpointError where a file is not in the list, or not as it says.

    Files go by their names without folders. Several are read at once, and how far it is is told.
    """
    wanted = _read(listed)
    missing = [path.name for path in files if path.name not in wanted]
    if missing:
        raise CheckpointError(
            f"{listed} has no line for {missing[0]}, which is one of {len(missing)}; make the list "
            "with sha256sum in the folder of the checkpoint, or take its publisher's"
        )

    def check(number: int, tell: Tell) -> None:
        path = files[number]
        if (found := _digest(path, tell)) != wanted[path.name]:
            raise CheckpointError(
                f"{path} is not as {listed.name} says: its SHA-256 is {found}, and "
                f"{wanted[path.name]} is listed; fetch it again"
            )

    progress = Progress(sum(path.stat().st_size for path in files))
    for _ in write_all(range(len(files)), workers, check, progress):
        pass


def _read(listed: Path) -> dict[str, str]:
    try:
        lines = listed.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise CheckpointError(f"{listed}: cannot be read ({error}); name a list") from error
    found = {}
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise CheckpointError(
                f"{listed}:{number}: {line[:80]!r} is no line of sha256sum; expected a digest of "
                "64 hexadecimal digits and the name of a file"
            )
        found[os.path.basename(match[2])] = match[1].lower()
    return found


def _digest(path: Path, tell: Tell) -> str:
    found = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        memory = bytearray(READ_BYTES)
        while size := file.readinto(memory):
            found.update(memoryview(memory)[:size])
            tell(size)
    return found.hexdigest()
