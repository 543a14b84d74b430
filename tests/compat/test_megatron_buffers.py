"""Moving Megatron's buffers of parameters, on stand-ins of them; test_learner has the real ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megarl.compat.megatron_buffers import ALIGNMENT, move_parameters, parameter_bytes
from megarl.errors import LearnerError


def _buffer(*sizes: int, dtype: torch.dtype = torch.float32) -> SimpleNamespace:
    """A buffer of parameters one after the other, each in a bucket of its own."""
    data = torch.arange(float(sum(sizes)), dtype=dtype)
    buffer = SimpleNamespace(param_data=data, params=[], param_index_map={}, buckets=[])
    start = 0
    for size in sizes:
        end = start + size
        parameter = torch.nn.Parameter(data[start:end].view(1, size))
        buffer.params.append(parameter)
        buffer.param_index_map[parameter] = (start, end, len(buffer.buckets))
        buffer.buckets.append(SimpleNamespace(param_data=data[start:end], offset=start))
        start = end
    return buffer


def _model(*buffers: SimpleNamespace) -> SimpleNamespace:
    parameters = [parameter for buffer in buffers for parameter in buffer.params]
    module = torch.nn.ParameterList(parameters)
    return SimpleNamespace(
        buffers=list(buffers[:1]),
        expert_parallel_buffers=list(buffers[1:]),
        named_parameters=module.named_parameters,
        more=module,
    )


def test_parameters_buckets_and_buffers_are_in_the_memory_with_their_values() -> None:
    buffers = _buffer(3, 5), _buffer(4, dtype=torch.bfloat16)
    model = _model(*buffers)
    assert parameter_bytes(model) == 2 * ALIGNMENT
    memory = torch.zeros(parameter_bytes(model), dtype=torch.uint8)
    move_parameters(model, memory)
    low, high = memory.data_ptr(), memory.data_ptr() + len(memory)
    for buffer in buffers:
        parts = [*buffer.params, *(bucket.param_data for bucket in buffer.buckets)]
        assert all(low <= part.data_ptr() < high for part in [buffer.param_data, *parts])
        assert torch.equal(torch.cat([p.data.view(-1) for p in buffer.params]), buffer.param_data)
        assert torch.equal(buffer.param_data.float(), torch.arange(float(len(buffer.param_data))))
    buffers[0].buckets[1].param_data.fill_(9)
    assert torch.equal(buffers[0].params[1].data, torch.full((1, 5), 9.0))


def test_parameter_of_no_buffer_is_refused_and_nothing_is_moved() -> None:
    model = _model(_buffer(3))
    model.more.append(torch.nn.Parameter(torch.zeros(2)))
    before = model.buffers[0].param_data
    with pytest.raises(LearnerError, match="1 is in none of Megatron's buffers"):
        move_parameters(model, torch.zeros(ALIGNMENT, dtype=torch.uint8))
    assert model.buffers[0].param_data is before


@pytest.mark.parametrize("part", ["bucket", "parameter"])
def test_buffer_of_another_build_is_refused(part: str) -> None:
    model = _model(_buffer(3, 5))
    if part == "bucket":
        model.buffers[0].buckets[1].param_data = torch.zeros(5)
    else:
        model.buffers[0].params[1].data = torch.zeros(1, 5)
    with pytest.raises(LearnerError, match=f"a {part} of .* another version"):
        move_parameters(model, torch.zeros(ALIGNMENT, dtype=torch.uint8))
