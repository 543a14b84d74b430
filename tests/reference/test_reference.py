"""The reference and its exchange with the live weights."""

import pytest
import torch

from megarl.reference.reference import Reference


def live_weights() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Two parameters that are views of one buffer, as Megatron's are, and one in bf16."""
    buffer = torch.arange(6, dtype=torch.float32)
    other = torch.tensor([0.1, -0.2], dtype=torch.bfloat16)
    return buffer, {"a": buffer[:2].view(1, 2), "b": buffer[2:], "c": other}


def test_reference_stands_in_the_live_storage_and_the_policy_returns_bit_for_bit() -> None:
    buffer, weights = live_weights()
    start = {name: weight.clone() for name, weight in weights.items()}
    reference = Reference(weights)
    buffer.mul_(-1.7)
    weights["c"].add_(1e-3)
    trained = {name: weight.clone() for name, weight in weights.items()}
    for _ in range(2):
        with reference.applied():
            assert all(torch.equal(weights[name], start[name]) for name in weights)
            assert torch.equal(buffer[:2], start["a"][0])
        assert all(torch.equal(weights[name], trained[name]) for name in weights)
    assert reference.num_bytes == 6 * 4 + 2 * 2


def test_policy_returns_after_an_error_inside() -> None:
    buffer, weights = live_weights()
    reference = Reference(weights)
    buffer.add_(1)
    trained = buffer.clone()
    with pytest.raises(ValueError, match="inside"), reference.applied():
        raise ValueError("inside")
    assert torch.equal(buffer, trained)
