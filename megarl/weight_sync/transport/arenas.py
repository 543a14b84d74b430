"""Which memory an arena lies in: a GPU's where servers of the node can open it, else the host's;
memory of its own, or the parameters themselves.

Owns that choice on both sides, and says in the log what it was. Knows nothing of plans.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Literal

import torch

from megarl.errors import WeightSyncError
from megarl.weight_sync.transport.cuda_driver import DeviceMemory, cuda
from megarl.weight_sync.transport.cuda_export import can_stage
from megarl.weight_sync.transport.cuda_ipc import CudaArena, CudaArenaReader
from megarl.weight_sync.transport.in_place import InPlaceArena, InPlaceReader
from megarl.weight_sync.transport.shared import Arena, ArenaReader, ArenaRef

log = logging.getLogger(__name__)

Policy = Literal["kept", "released", "host"]
"""Of arenas on GPUs. kept: servers keep what is staged open; released: its memory is given back
after every publish; host: in host memory whatever the device."""

AnyArena = Arena | InPlaceArena | CudaArena
AnyReader = ArenaReader | InPlaceReader | CudaArenaReader


@cache
def memory_of(device: torch.device) -> DeviceMemory | None:
    """The GPU memory for arenas of tensors on `device`; None where they belong into the host's.

    Tries, once, whether this process can export memory of the GPU.
    """
    if device.type != "cuda":
        return None
    memory = cuda(device)
    verdict = can_stage(memory)
    if not verdict.ok:
        log.warning("arenas are in host memory gpu=%s why=%s", memory.gpu, verdict.why)
        return None
    return memory


def make_arena(
    memory: DeviceMemory | Arena | None,
    run_id: str,
    generation: int,
    rank: int,
    num_bytes: int,
    digest: str,
    live: Mapping[int, torch.Tensor],
    others: Mapping[int, int],
    is_lasting: bool,
) -> AnyArena:
    """An arena of `num_bytes` in a GPU's `memory`, or in the host's.

    `live` are tensors that hold, as they are, what is to lie at their offsets, `others` the bytes
    of what travels in another type. A GPU's arena is made of tensors where their memory can be
    exported and there are no others; the host's of those that lie in the Arena `memory`. Nothing of
    them is copied. `is_lasting` is `CudaArena.staged`'s.
    """
    why = "it travels in another type"
    if memory is None or isinstance(memory, Arena):
        if memory is not None and live:
            try:
                arena = InPlaceArena(memory, run_id, generation, rank, live, others, digest)
            except WeightSyncError as error:
                why = str(error)
            else:
                staged_bytes = arena.ref.num_bytes - arena.ref.table_bytes
                log.info("arena made kind=in_place bytes=%d staged=%d", num_bytes, staged_bytes)
                return arena
        if memory is not None:
            log.info("arena made kind=staged bytes=%d why=%s", num_bytes, why)
        return Arena(run_id, generation, rank, num_bytes, digest)
    if live and not others:
        try:
            direct = CudaArena.direct(memory, run_id, generation, rank, live, digest)
        except WeightSyncError as error:
            why = str(error)
        else:
            log.info("arena made kind=direct gpu=%s bytes=%d", memory.gpu, num_bytes)
            return direct
    staged = CudaArena.staged(memory, run_id, generation, rank, num_bytes, digest, is_lasting)
    log.info("arena made kind=staged gpu=%s bytes=%d why=%s", memory.gpu, num_bytes, why)
    return staged


def reading_memory(device: torch.device) -> DeviceMemory:
    """The memory of the GPU that a server rank computes on."""
    if device.type != "cuda":
        raise WeightSyncError(
            f"the learner's arena is in a GPU's memory, which a server on {device} cannot read; "
            "run learner and servers on one kind of device"
        )
    return cuda(device)


def open_arena(ref: ArenaRef, digest: str, device: torch.device) -> AnyReader:
    """The arena that `ref` and `digest` name, to be read on `device`.

    Raises WeightSyncError where it is not there, or is another.
    """
    if ref.gpu:
        return CudaArenaReader(ref, digest, reading_memory(device))
    if ref.table_bytes:
        return InPlaceReader(ref, digest)
    return ArenaReader(ref, digest)
