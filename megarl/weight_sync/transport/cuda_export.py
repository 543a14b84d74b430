"""The probe: whether other processes can open a tensor's memory through CUDA IPC, and why not."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megarl.errors import WeightSyncError
from megarl.weight_sync.transport.cuda_driver import DeviceMemory, cuda


class Export(NamedTuple):
    """Whether other processes can open a tensor's memory; `why` not, in words."""

    ok: bool
    why: str = ""


def can_export(tensor: torch.Tensor, memory: DeviceMemory | None = None) -> Export:
    """Whether `tensor` can be read in place by another process through CUDA IPC.

    Asks the driver, and then exports the memory to see. `memory` is that of the tensor's device.
    """
    if memory is None:
        if not tensor.is_cuda:
            return Export(False, f"it is on {tensor.device}, not on a GPU")
        memory = cuda(tensor.device)
    if not tensor.is_contiguous():
        return Export(False, f"it is not contiguous (strides {tuple(tensor.stride())})")
    try:
        found = memory.allocation(tensor.data_ptr())
        if found.why_not:
            return Export(False, found.why_not)
        end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
        if end > found.base + found.num_bytes:
            return Export(False, "it spans several allocations of the driver's")
        memory.export(found.base)
    except WeightSyncError as error:
        return Export(False, str(error))
    return Export(True)


def can_stage(memory: DeviceMemory) -> Export:
    """Whether this process can export memory of the GPU at all: takes a little and tries."""
    try:
        pointer = memory.allocate(1)
        try:
            memory.export(pointer)
        finally:
            memory.free(pointer)
    except WeightSyncError as error:
        return Export(False, str(error))
    return Export(True)
