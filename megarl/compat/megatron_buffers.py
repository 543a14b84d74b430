"""Megatron's buffers of parameters, moved into other memory.

Owns which tensors refer to a buffer. Knows nothing of what the memory is for.

For: megatron-core 0.19.2 (private names are touched, so the version is exact). Ends when Megatron's
DistributedDataParallel takes the memory of its buffers from its caller.
"""

from __future__ import annotations

from typing import Any

import torch

from megarl.errors import LearnerError

ALIGNMENT = 4096  # bytes; a page


def parameter_bytes(model: Any) -> int:
    """What `move_parameters` needs for `model`, a DistributedDataParallel or several as one."""
    return sum(_aligned(buffer.param_data.nbytes) for buffer in _buffers(model))


def move_parameters(model: Any, memory: torch.Tensor) -> None:
    """Have all parameters live in `memory` (uint8), as they are, and free where they lived.

    To be called before an optimizer is built or a gradient computed: from then on others refer to
    the buffers. Raises LearnerError, with nothing changed, where a parameter is in no buffer.
    """
    _check(model)
    at = 0
    for buffer in _buffers(model):
        old = buffer.param_data
        new = memory[at : at + old.nbytes].view(old.dtype)
        at += _aligned(old.nbytes)
        new.copy_(old)
        for bucket in buffer.buckets:
            bucket.param_data = new[bucket.offset : bucket.offset + bucket.param_data.numel()]
        for parameter in buffer.params:
            start, end, _ = buffer.param_index_map[parameter]
            parameter.data = new[start:end].view(parameter.shape)
        buffer.param_data = new


def _buffers(model: Any) -> list[Any]:
    return [*model.buffers, *model.expert_parallel_buffers]


def _check(model: Any) -> None:
    """Raise LearnerError unless buffers are as this file takes them to be."""
    found = set()
    for buffer in _buffers(model):
        for bucket in buffer.buckets:
            _same(buffer, "a bucket", bucket.param_data, bucket.offset, bucket.param_data.numel())
        for parameter in buffer.params:
            start, end, _ = buffer.param_index_map[parameter]
            _same(buffer, "a parameter", parameter.data, start, end - start)
            found.add(id(parameter))
    for name, parameter in model.named_parameters():
        if id(parameter) not in found:
            raise LearnerError(f"{name} is in none of Megatron's buffers, so it cannot be moved")


def _same(buffer: Any, what: str, part: torch.Tensor, start: int, numel: int) -> None:
    expected = buffer.param_data[start : start + numel]
    if part.data_ptr() != expected.data_ptr() or part.numel() != expected.numel():
        raise LearnerError(
            f"{what} of {tuple(part.shape)} is not where Megatron's buffer says; this "
            "megatron-core is another version than the one that this was written for"
        )


def _aligned(num_bytes: int) -> int:
    return (num_bytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
