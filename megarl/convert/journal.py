"""The folder of a conversion until it is whole: what is written already, and its name at the end.

Owns `conversion.json` and the receipts of files. A conversion is written beside its place and
renamed; one that was killed goes on with the files that it had finished.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.convert.formats import RECORD
from megarl.durable import sync_path
from megarl.errors import MALFORMED, CheckpointError

PARTIAL = ".partial"
RECEIPTS = ".receipts"
LOCK_S = 10.0  # to wait for the lock of another
JSON, NEW = ".json", ".new"  # ends of names


def unfinished(final: Path) -> Path:
    """The folder that is written before it has its name.

    >>> str(unfinished(Path("made/qwen")))
    'made/qwen.partial'
    """
    return final.with_name(final.name + PARTIAL)


class Journal:
    """The unfinished folder of a conversion to `final`, alone in its use of it.

    `facts` are plain values that tell this conversion from others: of another one, nothing is kept.
    `receipts` are of the files that are written, by name. Raises CheckpointError where `final`
    exists, another process writes there, or something else stands in the way.
    """

    def __init__(self, final: Path, facts: Mapping[str, Any]) -> None:
        self.final, self.folder = final, unfinished(final)
        self._facts = json.loads(json.dumps(dict(facts)))
        self._receipts = self.folder / RECEIPTS
        self._lock = _make_and_lock(self.folder, final)
        begun = _record(self.folder)
        if begun is None and {path.name for path in self.folder.iterdir()} - {RECORD + NEW}:
            raise CheckpointError(
                f"{self.folder} is in the way and no conversion of megarl; move it away"
            )
        is_same = begun is not None and begun.get("facts") == self._facts
        if not is_same:
            _empty(self.folder)
        self.is_whole = is_same and begun is not None and begun["finished"] is True
        self._record(self.is_whole)
        self._receipts.mkdir(exist_ok=True)
        self.receipts: dict[str, Any] = {}
        for path in self._receipts.glob(f"*{JSON}"):
            # Of a machine that died, or a file that is gone since: it is made again.
            with contextlib.suppress(OSError, *MALFORMED):
                name = path.name.removesuffix(JSON)
                found = json.loads(path.read_text(encoding="utf-8"))
                if found["size"] == (self.folder / name).stat().st_size:
                    self.receipts[name] = found["receipt"]

    def add(self, name: str, receipt: Any) -> None:
        """A file is on the disk."""
        size = (self.folder / name).stat().st_size
        _write(self._receipts / f"{name}{JSON}", {"size": size, "receipt": receipt})
        self.receipts[name] = receipt

    def finish(self) -> None:
        """Everything is written: give the folder its name. Raises CheckpointError, OSError."""
        self._record(True)
        shutil.rmtree(self._receipts)
        for path in self.folder.iterdir():
            sync_path(path)
        sync_path(self.folder)
        check_free(self.final)
        self.folder.rename(self.final)
        sync_path(self.final.parent)

    def close(self) -> None:
        """Leave the folder to others."""
        os.close(self._lock)

    def _record(self, is_finished: bool) -> None:
        _write(self.folder / RECORD, {"finished": is_finished, "facts": self._facts})


def check_free(final: Path) -> None:
    """Raise CheckpointError where something has the name of the folder to write."""
    if os.path.lexists(final):
        raise CheckpointError(
            f"{final} exists already; nothing is overwritten: give another name, or move it away"
        )
    if not final.parent.is_dir():
        raise CheckpointError(f"{final.parent} is no folder, so {final.name} cannot be made in it")


def _record(folder: Path) -> Mapping[str, Any] | None:
    """What is written of the conversion that is in a folder; None where there is none."""
    try:
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) and "finished" in found else None
    except (OSError, *MALFORMED):
        return None


def _make_and_lock(folder: Path, final: Path) -> int:
    """A lock on the folder, which is made where it is not there.

    Another conversion that is waited for gives the folder its name `final`.
    """
    while True:
        check_free(final)
        folder.mkdir(exist_ok=True)
        descriptor = _lock(folder)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), folder.stat()):
                return descriptor
        os.close(descriptor)


def _lock(folder: Path) -> int:
    """A lock on the folder that ends with the process; none where the file system has none.

    A killed conversion's workers hold it until they have ended too, a moment later.
    """
    descriptor, until = os.open(folder, os.O_RDONLY), time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError as error:
            if time.monotonic() > until:
                os.close(descriptor)
                raise CheckpointError(
                    f"another conversion is writing {folder}; wait for it"
                ) from error
            time.sleep(0.02)
        except OSError:
            return descriptor


def _empty(folder: Path) -> None:
    """Remove what another conversion has left, but its record."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != RECORD:
            path.unlink()


def _write(path: Path, value: Any) -> None:
    """A file of plain values, there as a whole or not at all."""
    partial = path.with_name(path.name + NEW)
    partial.write_text(json.dumps(value), encoding="utf-8")
    partial.rename(path)
