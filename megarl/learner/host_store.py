"""Host memory in which storages of device tensors wait: copied there, emptied, and filled again.

Owns the block of memory and the copies. Knows nothing of what the tensors are for; imports torch
only, so that it can be tried on a bare GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

from megarl.errors import LearnerError

log = logging.getLogger(__name__)

ALIGNMENT = 512  # bytes; of each storage's place in host memory


@dataclass(frozen=True, slots=True)
class _Parked:
    """A storage and its place in host memory."""

    storage: UntypedStorage
    start: int
    num_bytes: int


class HostStore:
    """Host memory that storages are kept in: one block, page-locked for a GPU, that stays.

    It grows where more is parked than ever before. torch's own pinned memory is not used: it takes
    the next power of two.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._block = torch.empty(0, dtype=torch.uint8)
        self._is_pinned = False
        self._parked: list[_Parked] = []

    @property
    def num_bytes(self) -> int:
        """Host memory that it takes."""
        return self._block.numel()

    @property
    def is_page_locked(self) -> bool:
        """Whether copies to and from a GPU go at full speed."""
        return self._is_pinned

    def park(self, storages: Iterable[UntypedStorage]) -> None:
        """Copy the storages here and empty them. Raises LearnerError where one is of fixed size."""
        parked, end = [], 0
        for storage in storages:
            if not storage.resizable():
                raise LearnerError(
                    f"offload: a storage of {storage.nbytes()} bytes cannot be given back: it is "
                    "shared memory (set weight_sync.shared_weights = false), or `numpy()` was "
                    "called on a view of it, which fixes its size for good (numpy.from_dlpack does "
                    "not)"
                )
            parked.append(_Parked(storage, end, storage.nbytes()))
            end += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        if end > self.num_bytes:
            self._drop()
            self._take(end)
        for one in parked:
            self._place(one).copy_(_bytes(one.storage), non_blocking=True)
        synchronize(self._device)
        for one in parked:
            one.storage.resize_(0)
        self._parked = parked

    def unpark(self) -> None:
        """Fill the storages again. Where one has no room, those that are filled stay so."""
        for one in self._parked:
            if one.storage.nbytes() == 0 < one.num_bytes:
                one.storage.resize_(one.num_bytes)
                _bytes(one.storage).copy_(self._place(one), non_blocking=True)
        synchronize(self._device)
        self._parked = []

    def _drop(self) -> None:
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._block.data_ptr())
        self._block, self._is_pinned = torch.empty(0, dtype=torch.uint8), False

    def _take(self, num_bytes: int) -> None:
        self._block = torch.empty(num_bytes, dtype=torch.uint8)
        if self._device.type == "cuda":
            status = torch.cuda.cudart().cudaHostRegister(self._block.data_ptr(), num_bytes, 0)
            self._is_pinned = int(status) == 0
            if not self._is_pinned:
                log.warning("host memory not page-locked bytes=%d status=%s", num_bytes, status)

    def _place(self, parked: _Parked) -> Tensor:
        return self._block[parked.start : parked.start + parked.num_bytes]


def distinct_storages(tensors: Iterable[Tensor]) -> Iterator[UntypedStorage]:
    """The storages of the tensors, each once."""
    seen: set[int] = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if identity(storage) not in seen:
            seen.add(identity(storage))
            yield storage


def identity(storage: UntypedStorage) -> int:
    """The same for all views; its address would be 0 for every emptied one."""
    return int(storage._cdata)


def _bytes(storage: UntypedStorage) -> Tensor:
    """All of a storage as one row of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
