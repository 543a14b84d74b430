"""CUDA's driver, through ctypes: memory that another process can open, and tensors over it.

Owns the calls and the words for their errors. Knows nothing of arenas, plans or versions. The
driver (libcuda.so.1) and not the runtime library: it has one name and one interface whatever CUDA
torch was built for, so that learner and server may have different builds, and the base of an
allocation can be asked of it alone. Pointers are addresses on the device. Nothing happens at
import.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch.utils import dlpack

from megarl.errors import WeightSyncError

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE, cuda.h
GRANULARITY_BYTES = 2 << 20
"""A handle opens all 2 MiB blocks that its allocation lies in; share whole ones (CUDA's manual)."""

_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
# CUpointer_attribute, cuda.h
_IS_MANAGED, _IS_IPC_CAPABLE, _MEMPOOL_HANDLE = 8, 10, 17

VIRTUAL = (
    "it was mapped by virtual memory management (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, "
    "or an allocator that offloads, such as torch_memory_saver)"
)
POOLED = "it is of a stream-ordered pool (PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync)"
MANAGED = "it is managed memory"


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a pointer lies in: its first address, its bytes, and why no other process may open it.

    `why_not` is empty where one may; else the pointer itself stands for the whole.
    """

    base: int
    num_bytes: int
    why_not: str = ""


class DeviceMemory(Protocol):
    """What an arena asks of the memory of one GPU. Errors are WeightSyncErrors."""

    @property
    def device(self) -> torch.device:
        """The GPU as this process numbers it."""

    @property
    def gpu(self) -> str:
        """The GPU's UUID, which all processes agree on."""

    def allocate(self, num_bytes: int) -> int:
        """The pointer to new memory that can be exported."""

    def free(self, pointer: int) -> None:
        """Give back what `allocate` gave, when no other process has it open."""

    def allocation(self, pointer: int) -> Allocation:
        """What `pointer` lies in."""

    def export(self, base: int) -> bytes:
        """The handle by which another process opens the allocation that begins at `base`."""

    def open(self, handle: bytes) -> int:
        """The pointer to another process's allocation, until `close`."""

    def close(self, pointer: int) -> None:
        """Undo `open`. No tensor over the memory may be used any more."""

    def synchronize(self) -> None:
        """Wait until the GPU has done what this process asked of it."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which the driver takes by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class Cuda:
    """One GPU's memory, in the context that torch uses (the primary one)."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._driver = _driver()
        self._call("cuInit", ctypes.c_uint(0))
        ordinal = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(ordinal), ctypes.c_int(index))
        found = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid_v2", found, ordinal)
        self._gpu = str(uuid.UUID(bytes=bytes(found)))
        self._context = ctypes.c_void_p()  # kept for the process's life, as torch keeps it
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), ordinal)

    @property
    def device(self) -> torch.device:
        """The GPU as this process numbers it."""
        return self._device

    @property
    def gpu(self) -> str:
        """The GPU's UUID."""
        return self._gpu

    def allocate(self, num_bytes: int) -> int:
        """Whole blocks of 2 MiB, past torch's allocator; it gives back its cache where needed."""
        size = max(1, -(-num_bytes // GRANULARITY_BYTES)) * GRANULARITY_BYTES
        pointer = ctypes.c_uint64()
        with self._current():
            status = self._status("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
            if status == _OUT_OF_MEMORY:
                torch.cuda.empty_cache()
                status = self._status("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        if status:
            free, total = torch.cuda.mem_get_info(self._device)
            raise WeightSyncError(
                f"an arena of {size} bytes on GPU {self._gpu}: {self._words(status)}; {free} of "
                f"{total} bytes are free: leave it more memory"
            )
        return int(pointer.value)

    def free(self, pointer: int) -> None:
        """Give back what `allocate` gave; waits for the GPU first."""
        self.synchronize()
        with self._current():
            self._call("cuMemFree_v2", ctypes.c_uint64(pointer))

    def allocation(self, pointer: int) -> Allocation:
        """What `pointer` lies in. Raises WeightSyncError where it is no memory of the GPU's."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        with self._current():
            why_not = self._why_not(pointer)
            if why_not:
                return Allocation(pointer, 0, why_not)
            self._call(
                "cuMemGetAddressRange_v2",
                ctypes.byref(base),
                ctypes.byref(size),
                ctypes.c_uint64(pointer),
            )
        return Allocation(int(base.value), int(size.value))

    def _why_not(self, pointer: int) -> str:
        if self._attribute(_IS_IPC_CAPABLE, pointer):
            return ""
        if self._attribute(_IS_MANAGED, pointer):
            return MANAGED
        return POOLED if self._attribute(_MEMPOOL_HANDLE, pointer) else VIRTUAL

    def _attribute(self, which: int, pointer: int) -> int:
        value = ctypes.c_uint64()  # wide enough for each of the attributes asked
        status = self._status(
            "cuPointerGetAttribute",
            ctypes.byref(value),
            ctypes.c_int(which),
            ctypes.c_uint64(pointer),
        )
        return 0 if status else int(value.value)  # a driver that has not the attribute says no

    def export(self, base: int) -> bytes:
        """The handle of the allocation that begins at `base`."""
        handle = _Handle()
        with self._current():
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        """Map another process's allocation here, over NVLink or PCIe where it is another GPU's."""
        pointer = ctypes.c_uint64()
        with self._current():
            self._call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(pointer),
                _Handle.from_buffer_copy(handle),
                ctypes.c_uint(_LAZY_PEER_ACCESS),
            )
        return int(pointer.value)

    def close(self, pointer: int) -> None:
        """Unmap what `open` mapped; waits for the GPU first."""
        self.synchronize()
        with self._current():
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))

    def synchronize(self) -> None:
        """Wait until the GPU has done what this process asked of it."""
        torch.cuda.synchronize(self._device)

    @contextmanager
    def _current(self) -> Iterator[None]:
        """torch's context, for this thread, until the block ends."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _status(self, function: str, *arguments: object) -> int:
        return int(self._driver[function](*arguments))

    def _call(self, function: str, *arguments: object) -> None:
        status = self._status(function, *arguments)
        if status:
            raise WeightSyncError(f"CUDA's {function}: {self._words(status)}")

    def _words(self, status: int) -> str:
        text = ctypes.c_char_p()
        self._driver.cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
        return f"{(text.value or b'unknown error').decode()} ({status})"


@cache
def cuda(device: torch.device) -> Cuda:
    """The one `Cuda` of a GPU in this process."""
    return Cuda(device)


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise WeightSyncError(f"CUDA's driver cannot be loaded: {error}") from error


class _DLTensor(ctypes.Structure):
    """DLManagedTensor of dlpack.h 0.x, flattened, and room for the one extent it points to."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("extent", ctypes.c_int64),
    ]


_DEVICE_TYPES = {"cpu": 1, "cuda": 2}  # kDLCPU, kDLCUDA
_CAPSULE = b"dltensor"  # outlives every capsule: Python keeps the pointer to it only


def tensor_over(pointer: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """A uint8 tensor [num_bytes] over memory at `pointer`, which torch neither owns nor frees.

    `device` is where torch computes with it: for memory of a GPU that this process does not see,
    the GPU that it was opened on. By DLPack, as torch offers no other way to say the device.
    """
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8, device=device)
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    address = libc.malloc(ctypes.c_size_t(ctypes.sizeof(_DLTensor)))
    found = _DLTensor.from_address(address)
    found.data, found.byte_offset = pointer, 0
    found.device_type, found.device_id = _DEVICE_TYPES[device.type], device.index or 0
    found.ndim, found.extent, found.strides = 1, num_bytes, None
    found.shape = address + _DLTensor.extent.offset
    found.code, found.bits, found.lanes = 1, 8, 1  # kDLUInt
    found.manager_ctx = None
    # free(address) is all there is to do when the last view has gone, also while Python ends.
    found.deleter = ctypes.cast(libc.free, ctypes.c_void_p).value
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
    )
    tensor: torch.Tensor = dlpack.from_dlpack(new(address, _CAPSULE, None))
    return tensor
