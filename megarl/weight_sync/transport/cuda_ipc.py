"""Arenas in a GPU's memory, which the server ranks of the node open by CUDA IPC and read in place.

An arena is either *staged* (memory of its own, taken past torch's allocator so that it can always
be exported) or *direct* (the learner's own parameters, where their memory can be exported). Its
header is an arena of `shared`: a small file under /dev/shm with name, nonce, digest and stamp,
whose bytes are the table of what lies where. Knows nothing of layouts, plans or versions.

CUDA leaves undefined what happens to memory that is freed while another process has it open. A
reader therefore holds a lock on the header file while it has the memory open, which the kernel
drops with the process, and an owner keeps staged memory until nobody holds one.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import struct
import weakref
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from megarl.errors import MALFORMED, WeightSyncError
from megarl.weight_sync.transport.cuda_driver import Allocation, DeviceMemory, tensor_over
from megarl.weight_sync.transport.cuda_export import can_export
from megarl.weight_sync.transport.shared import FOLDER, Arena, ArenaReader, ArenaRef

log = logging.getLogger(__name__)

_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid; fcntl(2)


class Place(NamedTuple):
    """Bytes [offset, offset + num_bytes) of an arena lie at `start` of allocation `segment`."""

    offset: int
    num_bytes: int
    segment: int
    start: int


@dataclass(frozen=True, slots=True)
class Table:
    """What the header says of an arena: the GPU, the process that owns it and its PID namespace,
    allocations' handles, places by offset.

    `is_lasting` says that readers may have it open between syncs.
    """

    gpu: str
    owner: str
    namespace: int
    is_lasting: bool
    handles: tuple[str, ...]
    places: tuple[Place, ...]

    def to_bytes(self) -> bytes:
        """The table as JSON."""
        fields = [self.gpu, self.owner, self.namespace, self.is_lasting, self.handles, self.places]
        return json.dumps(fields, separators=(",", ":")).encode()

    @staticmethod
    @lru_cache(maxsize=64)  # a direct arena's is the same at every publish
    def from_bytes(text: bytes) -> Table:
        """The inverse of `to_bytes`. Raises WeightSyncError where `text` is no table."""
        try:
            gpu, owner, namespace, is_lasting, handles, places = json.loads(text)
            found = tuple(Place(*place) for place in places)
            return Table(gpu, owner, namespace, is_lasting, tuple(handles), found)
        except MALFORMED as error:
            raise WeightSyncError(
                f"an arena's table cannot be read ({error}); use one version of megarl in learner "
                "and rollout"
            ) from error

    @property
    def sizes(self) -> list[int]:
        """Of each allocation, the bytes up to the end of what the arena has in it."""
        ends = [0] * len(self.handles)
        for place in self.places:
            ends[place.segment] = max(ends[place.segment], place.start + place.num_bytes)
        return ends

    def find(self, offset: int, num_bytes: int) -> Place:
        """Where that stretch of the arena lies. Raises WeightSyncError where it is nowhere."""
        index = bisect_right(self.places, offset, key=lambda place: place.offset) - 1
        if index >= 0:
            place = self.places[index]
            if offset + num_bytes <= place.offset + place.num_bytes:
                start = place.start + offset - place.offset
                return Place(offset, num_bytes, place.segment, start)
        raise WeightSyncError(
            f"the arena has nothing whole at bytes [{offset}, {offset + num_bytes}); use one "
            "version of megarl in learner and rollout"
        )


class CudaArena:
    """One arena on the side that owns it. Made by `staged` or `direct`.

    `data` is a uint8 tensor over a staged arena, and empty for a direct one. `ref` names the
    header, and the GPU by its UUID. `is_lasting` says that it may stay open between syncs.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        header: Arena,
        is_lasting: bool,
        pointer: int | None,
        data: torch.Tensor,
    ) -> None:
        self._memory, self._header, self._pointer = memory, header, pointer
        self.is_lasting, self.is_direct = is_lasting, pointer is None
        self._lock = os.open(FOLDER / header.ref.name, os.O_RDWR | os.O_CLOEXEC)
        self.ref = replace(header.ref, gpu=memory.gpu)
        self.data = data

    @classmethod
    def staged(
        cls,
        memory: DeviceMemory,
        run_id: str,
        generation: int,
        rank: int,
        num_bytes: int,
        digest: str,
        is_lasting: bool = True,
    ) -> CudaArena:
        """An arena of `num_bytes` in memory of its own. Raises WeightSyncError where there is none.

        Frees, before, what earlier ones left behind that nobody has open any more. Unless it is
        lasting, readers close it before they answer, so that it can be freed after each publish.
        """
        sweep()
        pointer = memory.allocate(num_bytes)
        try:
            where = (memory.gpu, _this_process(), _namespace(), is_lasting)
            table = Table(*where, (memory.export(pointer).hex(),), (Place(0, num_bytes, 0, 0),))
            header = _header(run_id, generation, rank, table, digest)
        except Exception:  # nobody else would give it back
            memory.free(pointer)
            raise
        data = tensor_over(pointer, num_bytes, memory.device)
        return cls(memory, header, is_lasting, pointer, data)

    @classmethod
    def direct(
        cls,
        memory: DeviceMemory,
        run_id: str,
        generation: int,
        rank: int,
        tensors: Mapping[int, torch.Tensor],
        digest: str,
    ) -> CudaArena:
        """An arena made of `tensors`, which stay where they are, by their offsets in it.

        Good for one publish: its readers close it before they answer, as the tensors may move.
        Raises WeightSyncError where one cannot be exported; `can_export` says so beforehand.
        """
        segments: list[Allocation] = []
        handles: list[str] = []
        places = []
        for offset, tensor in sorted(tensors.items()):
            pointer, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
            index = _holding(segments, pointer, size) if tensor.is_contiguous() else -1
            if index < 0:
                verdict = can_export(tensor, memory)
                if not verdict.ok:
                    raise WeightSyncError(f"a parameter cannot be exported: {verdict.why}")
                index = len(segments)
                segments.append(memory.allocation(pointer))
                handles.append(memory.export(segments[index].base).hex())
            places.append(Place(offset, size, index, pointer - segments[index].base))
        where = (memory.gpu, _this_process(), _namespace())
        table = Table(*where, False, tuple(handles), tuple(places))
        header = _header(run_id, generation, rank, table, digest)
        return cls(memory, header, False, None, torch.empty(0, dtype=torch.uint8))

    @property
    def is_whole(self) -> bool:
        """Whether readers still find the header under its name, as it was made."""
        return self._header.is_whole

    def stages(self, offset: int) -> bool:
        """Whether what is to lie there must be copied there."""
        return not self.is_direct

    def view(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Bytes [offset, offset + num_bytes) of a staged arena, without a copy."""
        return self.data[offset : offset + num_bytes]

    def stamp(self, label: str) -> None:
        """Say what the bytes are now, after the GPU has written them."""
        self._memory.synchronize()
        self._header.stamp(label)

    @property
    def is_read(self) -> bool:
        """Whether another process has the arena open."""
        if _try_lock(self._lock, fcntl.F_WRLCK):
            _try_lock(self._lock, fcntl.F_UNLCK)
            return False
        return True

    def close(self) -> None:
        """Remove the header, and free the memory as soon as nobody has it open (`sweep`)."""
        if self._lock < 0:
            return
        self._header.stamp("")  # whoever still reads sees that it reads too late
        self._header.close()
        self.data = torch.empty(0, dtype=torch.uint8)
        _KEPT.append(self)
        sweep()
        if self._lock >= 0:
            log.warning("arena kept, a server has it open arena=%s", self.ref.name)

    def _free(self) -> bool:
        """Give the memory back where nobody has it open."""
        if not _try_lock(self._lock, fcntl.F_WRLCK):  # kept: nobody opens it from now on
            return False
        if self._pointer is not None:
            self._memory.free(self._pointer)
        os.close(self._lock)
        self._lock, self._pointer = -1, None
        return True


_KEPT: list[CudaArena] = []
"""Closed arenas of this process that somebody had open when they were closed."""


def sweep() -> int:
    """Free what closed arenas left behind; returns how many of them are still open elsewhere."""
    _KEPT[:] = [arena for arena in _KEPT if not arena._free()]
    return len(_KEPT)


def _holding(segments: Sequence[Allocation], pointer: int, num_bytes: int) -> int:
    """Which allocation that memory lies in; -1 where in none of them."""
    for index, found in enumerate(segments):
        if found.base <= pointer and pointer + num_bytes <= found.base + found.num_bytes:
            return index
    return -1


@cache
def _token() -> str:
    return secrets.token_hex(8)


def _this_process() -> str:
    """A name that no other process has, be it a fork or in another container."""
    return f"{os.getpid()}.{_token()}"


def _namespace() -> int:
    """This process's PID namespace: a container's own, or the machine's."""
    return os.stat("/proc/self/ns/pid").st_ino


def _header(run_id: str, generation: int, rank: int, table: Table, digest: str) -> Arena:
    text = table.to_bytes()
    header = Arena(run_id, generation, rank, len(text), digest)
    header.data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    return header


def _try_lock(descriptor: int, kind: int) -> bool:
    """An open-file-description lock, beside the flock by which `shared` knows a living owner."""
    request = struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    except BlockingIOError:
        return False
    except OSError as error:
        raise WeightSyncError(
            f"{FOLDER} has no locks of open files ({error}), by which GPU arenas are kept while "
            'they are read; set weight_sync.gpu_arenas = "never"'
        ) from error
    return True


_OPEN: set[str] = set()
"""Handles that this process has open: a second opening would share the first one's end."""


class CudaArenaReader:
    """One arena, open for reading in another process, until `close`.

    `memory` is that of the GPU that reads. Raises WeightSyncError where the arena is not there, is
    not the one that `ref` and `digest` name, is this process's own, or is open here already.
    `where` says at which addresses its bytes are: views of two readers with equal ones are alike.
    """

    def __init__(self, ref: ArenaRef, digest: str, memory: DeviceMemory) -> None:
        self.ref, self._memory = ref, memory
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            lock = os.open(FOLDER / os.path.basename(ref.name), flags)
        except FileNotFoundError:
            lock = -1  # the reader of the header says why
        opened: dict[str, int] = {}
        try:
            self._header = ArenaReader(ref, digest)
            self._table = Table.from_bytes(bytes(self._header.data.numpy()))
            self._refuse_what_is_not_ours_to_open()
            if not _try_lock(lock, fcntl.F_RDLCK):
                raise WeightSyncError(f"arena {ref.name} is being removed by its owner")
            for handle in self._table.handles:
                opened[handle] = _opened(ref, handle, memory)
                _OPEN.add(handle)
        except BaseException:
            _shut(memory, opened, lock)
            raise
        self._segments = [
            tensor_over(pointer, size, memory.device)
            for pointer, size in zip(opened.values(), self._table.sizes, strict=True)
        ]
        self.where: tuple[object, ...] = (tuple(opened.values()), self._table.places)
        self._finalizer = weakref.finalize(self, _shut, memory, opened, lock)
        self._finalizer.atexit = False  # the driver may have gone by then, and the process ends

    def _refuse_what_is_not_ours_to_open(self) -> None:
        if self._table.owner == _this_process():
            raise WeightSyncError(
                f"arena {self.ref.name} is this process's own, which CUDA cannot open twice; run "
                "learner and server in processes of their own"
            )
        if self._table.namespace != _namespace():
            raise WeightSyncError(
                f"arena {self.ref.name} is of a process in another PID namespace, from which CUDA "
                "opens no memory; run learner and servers in one container (or share the host's "
                'namespace), or set weight_sync.gpu_arenas = "never"'
            )
        if self._table.gpu != self.ref.gpu:
            raise WeightSyncError(
                f"arena {self.ref.name} is on GPU {self._table.gpu}, expected {self.ref.gpu}"
            )
        again = _OPEN.intersection(self._table.handles)
        if again or len(set(self._table.handles)) < len(self._table.handles):
            raise WeightSyncError(
                f"memory of arena {self.ref.name} is open in this process already; its earlier "
                "reader must be closed first"
            )

    @property
    def is_lasting(self) -> bool:
        """Whether it may stay open between syncs."""
        return self._table.is_lasting

    @property
    def stamp(self) -> str:
        """What the owner last said the bytes are."""
        return self._header.stamp

    def check(self) -> None:
        """Raise WeightSyncError where the header is not what it was."""
        self._header.check()

    def view(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Bytes [offset, offset + num_bytes) as a uint8 tensor, without a copy.

        No view may be used after `close`: its memory is gone.
        """
        if not self._finalizer.alive:
            raise WeightSyncError(f"arena {self.ref.name} was closed and is read again")
        place = self._table.find(offset, num_bytes)
        return self._segments[place.segment][place.start : place.start + num_bytes]

    def close(self) -> None:
        """Unmap the memory, once, after the GPU has done what it was asked."""
        self._finalizer()


def _opened(ref: ArenaRef, handle: str, memory: DeviceMemory) -> int:
    try:
        return memory.open(bytes.fromhex(handle))
    except WeightSyncError as error:
        raise WeightSyncError(
            f"arena {ref.name} cannot be opened: {error}; its owner has ended, or GPU {ref.gpu} "
            f'cannot be read from {memory.gpu}: then set weight_sync.gpu_arenas = "never"'
        ) from error


def _shut(memory: DeviceMemory, opened: Mapping[str, int], lock: int) -> None:
    """Close handles, and only then let the owner know."""
    for handle, pointer in opened.items():
        memory.close(pointer)
        _OPEN.discard(handle)
    if lock >= 0:
        os.close(lock)
