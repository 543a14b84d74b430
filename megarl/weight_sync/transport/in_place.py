"""Arenas made of the learner's own parameters on a CPU: servers read them where they are.

The parameters must lie in shared memory, which the learner takes when it starts (`live_memory`). An
arena is then a small file that says which stretch of it is where in that memory; many arenas, for
servers of several kinds, share it. While one is stamped the parameters must not change: what was
read without the stamp on it afterwards is refused. Knows nothing of layouts, plans or versions.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import NamedTuple

import torch

from megarl.errors import WeightSyncError
from megarl.weight_sync.transport.shared import Arena, ArenaReader, ArenaRef

LIVE_DIGEST = hashlib.sha256(b"a learner's live parameters").hexdigest()
"""Of memory whose bytes mean what the arenas made of it say."""


def live_memory(run_id: str, rank: int, num_bytes: int) -> Arena:
    """Shared memory for a learner rank's parameters, all zero. Close it when the learner ends.

    Raises WeightSyncError where there is too little.
    """
    return Arena(run_id, None, rank, num_bytes, LIVE_DIGEST)


class Stretch(NamedTuple):
    """Bytes [offset, offset + num_bytes) of an arena lie from byte `start` of the memory on."""

    offset: int
    num_bytes: int
    start: int


class InPlaceArena:
    """One arena made of `tensors`, by their offsets in it, which all lie in `memory`.

    Raises WeightSyncError where one does not, or where readers would not find the memory any more.
    """

    is_lasting = True
    is_direct = True
    """It may stay open between syncs, and its bytes are the parameters themselves."""

    def __init__(
        self,
        memory: Arena,
        run_id: str,
        generation: int,
        rank: int,
        tensors: Mapping[int, torch.Tensor],
        digest: str,
    ) -> None:
        if not memory.is_whole:
            raise WeightSyncError(f"{memory.ref.name} was removed or changed from outside")
        stretches = [_stretch(memory, offset, tensor) for offset, tensor in sorted(tensors.items())]
        text = json.dumps([asdict(memory.ref), stretches]).encode()
        self._text = text
        self._memory, self._header = memory, Arena(run_id, generation, rank, len(text), digest)
        self._header.data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        self.ref = replace(self._header.ref, in_place=True)

    @property
    def is_whole(self) -> bool:
        """Whether readers still find header and memory under their names, as they were made."""
        is_same = bytes(self._header.data.numpy()) == self._text
        return is_same and self._header.is_whole and self._memory.is_whole

    def view(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Nothing is written to it: its bytes are there already."""
        raise WeightSyncError(f"arena {self.ref.name} is the parameters; nothing is staged in it")

    def stamp(self, label: str) -> None:
        """Say what the parameters are now; empty: they are about to change."""
        self._header.stamp(label)

    def close(self) -> None:
        """Remove the header. The memory stays."""
        self._header.stamp("")  # whoever still reads sees that it reads too late
        self._header.close()


def _stretch(memory: Arena, offset: int, tensor: torch.Tensor) -> Stretch:
    size = tensor.numel() * tensor.element_size()
    start = tensor.data_ptr() - memory.data.data_ptr()
    if not tensor.is_contiguous() or start < 0 or start + size > memory.ref.num_bytes:
        raise WeightSyncError(
            f"a parameter of shape {tuple(tensor.shape)} does not lie whole in {memory.ref.name}"
        )
    return Stretch(offset, size, start)


class InPlaceReader:
    """One such arena in another process: header and memory mapped for reading.

    Raises WeightSyncError where either is not there or is another than `ref` and `digest` name.
    """

    is_lasting = True
    """It may stay open between syncs."""

    def __init__(self, ref: ArenaRef, digest: str) -> None:
        self.ref = ref
        self._header = ArenaReader(ref, digest)
        memory, self._stretches = _read_table(bytes(self._header.data.numpy()))
        self._memory = ArenaReader(memory, LIVE_DIGEST)
        self.where: tuple[object, ...] = (self._memory.where, self._stretches)

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
        stretch = self._stretches[index] if index >= 0 else Stretch(0, 0, 0)
        start = stretch.start + offset - stretch.offset
        found = self._memory.view(start, num_bytes)
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
    except (ValueError, TypeError) as error:
        raise WeightSyncError(
            f"an arena's table cannot be read ({error}); use one version of megarl in learner and "
            "rollout"
        ) from error
