"""Arenas: shared memory that one learner rank writes and the server ranks of its host read.

Owns the file under /dev/shm, its header and its life. Knows nothing of layouts, plans or versions:
it is told a digest of what the bytes mean, and a stamp for what they are now. Bytes are counted
without the header.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import secrets
import socket
import struct
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch

from megarl.errors import WeightSyncError

FOLDER = Path("/dev/shm")
HEADER_BYTES = 4096  # one page, so that data begins page-aligned
_MAGIC = b"megarl1\0"
_FIELDS = struct.Struct("<8s32s64sQ64s")  # magic, nonce, digest, data bytes, stamp
_STAMP_AT = _FIELDS.size - 64
_NAME = re.compile(r"megarl_[A-Za-z0-9._-]+_(g\d+|live)_r\d+")
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of linux/mman.h, since Linux 5.14


@dataclass(frozen=True, slots=True)
class ArenaRef:
    """What a reader needs to find one arena and to know that it is the right one.

    `nonce` is new for every arena, so that a name used again is not mistaken for it; `host` is
    where it was made. The file holds the data but where it only says where they are: `gpu` is the
    UUID of the GPU whose memory has them (`cuda_ipc`), `table_bytes` the length of what says where
    in a learner's parameters they are, in other shared memory (`in_place`).
    """

    name: str
    num_bytes: int
    nonce: str
    host: str
    gpu: str = ""
    table_bytes: int = 0


def arena_name(run_id: str, generation: int | None, rank: int) -> str:
    """The file name of an arena; /dev/shm entries of a run all begin with megarl_<run_id>_.

    None is the generation of memory that lives as long as its owner. Raises WeightSyncError where
    `run_id` cannot be part of a file name.
    """
    age = "live" if generation is None else f"g{generation}"
    name = f"megarl_{run_id}_{age}_r{rank}"
    if not _NAME.fullmatch(name):
        raise WeightSyncError(
            f"run id {run_id!r} cannot name shared memory; use letters, digits, '.', '_' and '-'"
        )
    return name


class Arena:
    """One arena, on the side that owns it: made with mode 600, locked while its owner lives.

    `data` is a uint8 tensor over the whole arena. `digest` is 64 hex digits. Close it after every
    reader has answered; a process that ends in order removes what it still owns.
    """

    def __init__(
        self, run_id: str, generation: int | None, rank: int, num_bytes: int, digest: str
    ) -> None:
        name = arena_name(run_id, generation, rank)
        self._path = FOLDER / name
        self._descriptor = _create(self._path)
        self._finalizer = weakref.finalize(self, _remove, self._path, self._descriptor, os.getpid())
        self._map = self._allocate(HEADER_BYTES + max(num_bytes, 1))
        self.ref = ArenaRef(name, num_bytes, secrets.token_hex(16), socket.gethostname())
        self._map[: _FIELDS.size] = self._header = _FIELDS.pack(
            _MAGIC, self.ref.nonce.encode(), digest.encode(), num_bytes, b""
        )
        self.data = (
            torch.frombuffer(self._map, dtype=torch.uint8, count=num_bytes, offset=HEADER_BYTES)
            if num_bytes
            else torch.empty(0, dtype=torch.uint8)
        )

    def _allocate(self, size: int) -> mmap.mmap:
        """Map the file and take its memory now, in huge pages where the kernel has some for files.

        A full /dev/shm would otherwise end the process while it writes.
        """
        free = os.statvfs(FOLDER)
        free_bytes = free.f_bavail * free.f_frsize
        try:
            if size > free_bytes:
                raise OSError(errno.ENOSPC, "it is more than is free")
            os.ftruncate(self._descriptor, size)
            found = mmap.mmap(self._descriptor, size, flags=mmap.MAP_SHARED)
            _advise(found, mmap.MADV_HUGEPAGE)
            if not _advise(found, _POPULATE_WRITE):  # an older kernel, or it has become full
                os.posix_fallocate(self._descriptor, 0, size)
        except OSError as error:
            self._finalizer()
            if error.errno != errno.ENOSPC:
                raise
            raise WeightSyncError(
                f"{self._path} needs {size} bytes of shared memory and "
                f"{free_bytes} are free; give {FOLDER} more room"
            ) from error
        return found

    is_lasting = True
    is_direct = False
    """It may stay open between syncs, and its bytes are copies."""

    def stages(self, offset: int) -> bool:
        """Whether what is to lie there must be copied there."""
        return True

    def view(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Bytes [offset, offset + num_bytes), without a copy."""
        return self.data[offset : offset + num_bytes]

    @property
    def is_whole(self) -> bool:
        """Whether readers still find it under its name, as it was made."""
        try:
            there, mine = os.stat(self._path), os.fstat(self._descriptor)
        except FileNotFoundError:
            return False
        return (
            there.st_ino == mine.st_ino
            and there.st_size >= HEADER_BYTES + self.ref.num_bytes
            and self._map[:_STAMP_AT] == self._header[:_STAMP_AT]
        )

    def stamp(self, label: str) -> None:
        """Say what the bytes are now; written after them. At most 64 ASCII characters."""
        self._map[_STAMP_AT : _STAMP_AT + 64] = label.encode("ascii").ljust(64, b"\0")

    def close(self) -> None:
        """Remove the file. Readers keep what they have mapped until they drop it."""
        self._finalizer()
        self.data = torch.empty(0, dtype=torch.uint8)


class ArenaReader:
    """One arena, mapped for reading in another process. Unmapped with its last view.

    `where` says at which address its bytes are.

    Raises WeightSyncError where the arena is not there, or is not the one that `ref` and `digest`
    name.
    """

    def __init__(self, ref: ArenaRef, digest: str) -> None:
        self.ref = ref
        if not _NAME.fullmatch(ref.name):
            raise WeightSyncError(f"{ref.name!r} is not the name of an arena; nothing was opened")
        self._digest = digest
        self._map = _map_for_reading(ref)
        self.check()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # read-only memory: nobody writes here
            self.data = (
                torch.frombuffer(
                    self._map, dtype=torch.uint8, count=ref.num_bytes, offset=HEADER_BYTES
                )
                if ref.num_bytes
                else torch.empty(0, dtype=torch.uint8)
            )
        self.where: tuple[object, ...] = (self.data.data_ptr(), ref.num_bytes)

    def check(self) -> None:
        """Raise WeightSyncError where it is not what it was, or was cut short: reading what is not
        there ends the process."""
        _check_size(self.ref, self._map.size())
        magic, nonce, found, num_bytes, _ = _FIELDS.unpack(self._map[: _FIELDS.size])
        if magic != _MAGIC:
            raise WeightSyncError(f"arena {self.ref.name} has no header of megarl's; refused")
        if nonce != self.ref.nonce.encode():
            raise WeightSyncError(
                f"arena {self.ref.name} has nonce {nonce.decode(errors='replace')}, expected "
                f"{self.ref.nonce}: it is stale or belongs to another run; refused"
            )
        if found != self._digest.encode() or num_bytes != self.ref.num_bytes:
            raise WeightSyncError(
                f"arena {self.ref.name} holds another layout or dtype than this server's plan "
                f"({num_bytes} bytes, digest {found.decode(errors='replace')[:12]}; expected "
                f"{self.ref.num_bytes}, {self._digest[:12]}); refused"
            )

    is_lasting = True
    """It may stay open between syncs."""

    def view(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Bytes [offset, offset + num_bytes), without a copy."""
        return self.data[offset : offset + num_bytes]

    def close(self) -> None:
        """Drop the bytes."""
        self.data = torch.empty(0, dtype=torch.uint8)

    @property
    def stamp(self) -> str:
        """What the owner last said the bytes are."""
        return self._map[_STAMP_AT : _STAMP_AT + 64].rstrip(b"\0").decode("ascii", "replace")


def _map_for_reading(ref: ArenaRef) -> mmap.mmap:
    path = FOLDER / ref.name
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        raise WeightSyncError(_not_reachable(ref)) from error
    try:
        size = os.fstat(descriptor).st_size
        _check_size(ref, size)
        found = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        _advise(found, mmap.MADV_HUGEPAGE)
        return found
    finally:
        os.close(descriptor)


def _advise(mapped: mmap.mmap, advice: int) -> bool:
    """Tell the kernel what is wanted of a mapping; whether it could do that."""
    try:
        mapped.madvise(advice)
    except OSError:
        return False
    return True


def _check_size(ref: ArenaRef, size: int) -> None:
    if size < HEADER_BYTES + ref.num_bytes:
        raise WeightSyncError(
            f"arena {ref.name} has {size} bytes, expected {HEADER_BYTES + ref.num_bytes} or "
            "more: it is stale or belongs to another run; refused"
        )


def _not_reachable(ref: ArenaRef) -> str:
    here = socket.gethostname()
    if here != ref.host:
        return (
            f"arena {ref.name} does not exist on {here}; it was made on {ref.host}: the server "
            'runs on another host than the learner, which weight_sync.mode = "shared" cannot '
            "serve; place both on one host"
        )
    return (
        f"arena {ref.name} does not exist on {here}, where it was made: the learner has ended, or "
        f"the two do not share {FOLDER} (containers with their own?)"
    )


def _create(path: Path) -> int:
    """A new, empty, locked file. What a dead owner of the same name left is removed."""
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileExistsError:
        _remove_abandoned(path)
        descriptor = os.open(path, flags, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _remove_abandoned(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except BlockingIOError as error:
        raise WeightSyncError(
            f"{path} belongs to a process that is still running; end that run, or give this one "
            "another name"
        ) from error
    finally:
        os.close(descriptor)


def _remove(path: Path, descriptor: int, owner: int) -> None:
    if os.getpid() != owner:  # a forked child owns nothing
        return
    path.unlink(missing_ok=True)
    os.close(descriptor)
