"""Frozen models and their exchange with the live weights."""

import pytest
import torch

from megarl.float8 import dequantize, quantize, relative_error
from megarl.reference.reference import BLOCKS, FrozenModel


def live_weights() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Two parameters that are views of one buffer, as Megatron's are, and one in bf16."""
    buffer = torch.arange(6, dtype=torch.float32)
    other = torch.tensor([0.1, -0.2], dtype=torch.bfloat16)
    return buffer, {"a": buffer[:2].view(1, 2), "b": buffer[2:], "c": other}


def test_reference_stands_in_the_live_storage_and_the_policy_returns_bit_for_bit() -> None:
    buffer, weights = live_weights()
    start = {name: weight.clone() for name, weight in weights.items()}
    reference = FrozenModel(weights)
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
    reference = FrozenModel(weights)
    buffer.add_(1)
    trained = buffer.clone()
    with pytest.raises(ValueError, match="inside"), reference.applied():
        raise ValueError("inside")
    assert torch.equal(buffer, trained)


def matrices() -> dict[str, torch.Tensor]:
    """A linear, an embedding and a norm, in bf16."""
    torch.manual_seed(3)
    names = {"layers.0.linear_fc1.weight": (200, 130), "embedding.weight": (9, 8), "norm": (8,)}
    return {name: torch.randn(shape).to(torch.bfloat16) for name, shape in names.items()}


def test_model_in_float8_stands_as_its_blocks_say_and_the_policy_returns_bit_for_bit() -> None:
    weights = matrices()
    linear, *others = weights
    start = {name: weight.clone() for name, weight in weights.items()}
    frozen = FrozenModel(weights, "fp8")
    whole = FrozenModel(weights)
    assert frozen.quantization_error == relative_error(start[linear], BLOCKS) > 0
    assert frozen.num_bytes == 200 * 130 + 2 * 2 * 4 + 2 * (9 * 8 + 8)
    assert whole.num_bytes == 2 * (200 * 130 + 9 * 8 + 8)
    for weight in weights.values():
        weight.mul_(-1.7)
    trained = {name: weight.clone() for name, weight in weights.items()}
    expected = dequantize(*quantize(start[linear], BLOCKS), BLOCKS, torch.bfloat16)
    for _ in range(2):
        with pytest.raises(ValueError, match="inside"), frozen.applied():
            assert torch.equal(weights[linear], expected)
            assert all(torch.equal(weights[name], start[name]) for name in others)
            raise ValueError("inside")
        assert all(torch.equal(weights[name], trained[name]) for name in weights)


@pytest.mark.parametrize("storage", ["policy", "fp8"])
def test_several_frozen_models_take_turns_in_one_policy(storage: str) -> None:
    weights = matrices()
    policy = {name: weight.clone() for name, weight in weights.items()}

    def load(value: float) -> None:
        for weight in weights.values():
            weight.fill_(value)

    first = FrozenModel(weights, storage, lambda: load(1.5))
    second = FrozenModel(weights, storage, lambda: load(-2.0))
    for frozen, value in ((first, 1.5), (second, -2.0), (first, 1.5)):
        assert all(torch.equal(weights[name], policy[name]) for name in weights)
        with frozen.applied():
            assert all(bool((weight == value).all()) for weight in weights.values())
    assert all(torch.equal(weights[name], policy[name]) for name in weights)


def test_policy_stays_where_another_checkpoint_cannot_be_read() -> None:
    weights = matrices()
    policy = {name: weight.clone() for name, weight in weights.items()}

    def load() -> None:
        weights["norm"].zero_()
        raise ValueError("half read")

    with pytest.raises(ValueError, match="half read"):
        FrozenModel(weights, "policy", load)
    assert all(torch.equal(weights[name], policy[name]) for name in weights)
