"""Arenas made of the learner's own parameters on a CPU: servers read them where they are.

The parameters must lie in shared memory, which the learner takes when it starts (`live_memory`). An
arena is then a small file: a table of which stretch of it is where in that memory, and copies of
what is not there. Many arenas, for servers of several kinds, share the memory. While one is stamped
the parameters must not change: what was read without the stamp on it afterwards is refused. Knows
nothing of layouts, plans or versions.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import NamedTuple

import torch

from megarl.errors import MALFORMED, WeightSyncError
from megarl.weight_sync.transport.shared import Arena, ArenaReader, ArenaRef

_ALIGNMENT_BYTES = 64  # a cache line, and enough for any element type
LIVE_DIGEST = hashlib.sha256(b"a learner's live parameters").hexdigest()
"""Of memory whose bytes mean what the arenas made of it say."""


def live_memory(run_id: str, rank: int, num_bytes: int) -> Arena:
    """Shared memory for a learner rank's parameters, all zero. Close it when the learner ends.

    Raises WeightSyncError where there is too little.
    """
    return Arena(run_id, None, rank, num_bytes, LIVE_DIGEST)


class Stretch(NamedTuple):
    """Bytes [offset, offset + num_bytes) of an arena lie from byte `start` of the memory on.

    Of the copies behind the table instead, where it is not `in_memory`.
    """

    offset: int
    num_bytes: int
    start: int
    in_memory: bool


class InPlaceArena:
    """One arena made of those of the `live` tensors, by their offsets in it, that lie in `memory`.

    The rest of them, and the `others` (bytes by offset), are to be copied into it. Raises
    WeightSyncError where none lies there, or where readers would not find the memory any more.
    """

    is_lasting = True
    is_direct = True
    """It may stay open between syncs, and has bytes that are the parameters themselves."""

    def __init__(
        self,
        memory: Arena,
        run_id: str,
        generation: int,
        rank: int,
        live: Mapping[int, torch.Tensor],
        others: Mapping[int, int],
        digest: str,
    ) -> None:
        if not memory.is_whole:
            raise WeightSyncError(f"{memory.ref.name} was removed or changed from outside")
        starts = {offset: _start(memory, tensor) for offset, tensor in live.items()}
        sizes = {**others, **{offset: tensor.nbytes for offset, tensor in live.items()}}
        copied_bytes, stretches = 0, list[Stretch]()
        for offset, size in sorted(sizes.items()):
            start = starts.get(offset)
            if start is None:
                stretches.append(Stretch(offset, size, copied_bytes, in_memory=False))
                copied_bytes += _aligned(size)
            else:
                stretches.append(Stretch(offset, size, start, in_memory=True))
        if not any(stretch.in_memory for stretch in stretches):
            raise WeightSyncError(f"no parameter lies whole in {memory.ref.name}")
        self._copies = {s.offset: s for s in stretches if not s.in_memory}
        text = json.dumps([asdict(memory.ref), stretches]).encode()
        self._text = text.ljust(_aligned(len(text)))
        num_bytes = len(self._text) + copied_bytes
        self._memory, self._header = memory, Arena(run_id, generation, rank, num_bytes, digest)
        self._table.copy_(torch.frombuffer(bytearray(self._text), dtype=torch.uint8))
        self.ref = replace(self._header.ref, table_bytes=len(self._text))

    @property
    def _table(self) -> torch.Tensor:
        return self._header.view(0, len(self._text))

    @property
    def is_whole(self) -> bool:
        """Whether readers still find header and memory under their names, as they were made."""
        is_same = bytes(self._table.numpy()) == self._text
        return is_same and self._header.is_whole and self._memory.is_whole

    def stages(self, offset: int) -> bool:
        """Whether what is to lie there must be copied there."""
        return offset in self._copies

    def view(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Bytes [offset, offset + num_bytes) of a copy: all else is there already."""
        if not self.stages(offset):
            raise WeightSyncError(
                f"arena {self.ref.name} is the parameters there; nothing is copied"
            )
        return self._header.view(len(self._text) + self._copies[offset].start, num_bytes)

    def stamp(self, label: str) -> None:
        """Say what the parameters are now; empty: they are about to change."""
        self._header.stamp(label)

    def close(self) -> None:
        """Remove the header. The memory stays."""
        self._header.stamp("")  # whoever still reads sees that it reads too late
        self._header.close()


def _start(memory: Arena, tensor: torch.Tensor) -> int | None:
    """The byte of the memory at which the tensor begins; None where it does not lie there whole."""
    start = tensor.data_ptr() - memory.data.data_ptr()
    is_there = start >= 0 and start + tensor.nbytes <= memory.ref.num_bytes
    return start if is_there and tensor.is_contiguous() else None


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class InPlaceReader:
    """One such arena in another process: header and memory mapped for reading.

    Raises WeightSyncError where either is not there or is another than `ref` and `digest` name.
    """

    is_lasting = True
    """It may stay open between syncs."""

    def __init__(self, ref: ArenaRef, digest: str) -> None:
        self.ref = ref
        self._header = ArenaReader(ref, digest)
        table = self._header.view(0, ref.table_bytes)
        memory, self._stretches = _read_table(bytes(table.numpy()))
        self._memory = ArenaReader(memory, LIVE_DIGEST)
        has_copies = any(not stretch.in_memory for stretch in self._stretches)
        copies = self._header.where if has_copies else None
        self.where: tuple[object, ...] = (self._memory.where, self._stretches, copies)

    def check(self) -> None:
        """Raise WeightSyncError where header or memory is not what it was."""
        self._header.check()
        self._memory.check()

    @property
    def stamp(self) -> str:
        """What the owner last said the bytes are."""
        return self._header.stamp

    def view(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Bytes [offset, offset + num_bytes), without a copy."""
        index = bisect_right(self._stretches, offset, key=lambda stretch: stretch.offset) - 1
        stretch = self._stretches[index] if index >= 0 else Stretch(0, 0, 0, True)
        start = stretch.start + offset - stretch.offset
        if stretch.in_memory:
            found = self._memory.view(start, num_bytes)
        else:
            found = self._header.view(self.ref.table_bytes + start, num_bytes)
        if offset + num_bytes > stretch.offset + stretch.num_bytes or len(found) != num_bytes:
            raise WeightSyncError(
                f"arena {self.ref.name} has nothing whole at bytes [{offset}, {offset + num_bytes})"
                f" in the {self._memory.ref.num_bytes} bytes of {self._memory.ref.name}; refused"
            )
        return found

    def close(self) -> None:
        """Drop the bytes."""
        self._memory.close()
        self._header.close()


def _read_table(text: bytes) -> tuple[ArenaRef, tuple[Stretch, ...]]:
    try:
        memory, stretches = json.loads(text)
        return ArenaRef(**memory), tuple(Stretch(*stretch) for stretch in stretches)
    except MALFORMED as error:
        raise WeightSyncError(
            f"an arena's table cannot be read ({error}); use one version of megarl in learner and "
            "rollout"
        ) from error
