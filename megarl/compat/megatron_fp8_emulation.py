"""FP8 products of a decoder's linears, emulated on a CPU: never for training, only to be measured.

Owns what stands in for Transformer Engine's FP8 linears while `emulated` is open: the three
products of each linear with numbers rounded to float8 as its recipe rounds them, multiplied in
float32. What differs from a GPU: sums are exact to float32, and norms and gathers are never fused
with the rounding. Import it after `megatron_cpu.install()`.

For: megatron-core 0.19.2. Ends when Transformer Engine runs on a CPU.
"""

# T tokens, R rows of a weight (its outputs), C columns (its inputs)

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megarl.compat.megatron_experts import ColumnGroupedLinear, RowGroupedLinear
from megarl.compat.megatron_parts import WholeLinear
from megarl.float8 import E4M3_MAX, BlockScaling, dequantize, quantize

E5M2_MAX = 57344.0  # largest finite float8_e5m2, OCP 8-bit floating point spec 1.0


class Rounding:
    """How one recipe rounds the operands of a product, whose sums run along columns.

    Source: Transformer Engine 2.20.2, common/recipe: Float8BlockScaling has blocks of 128 x 128 in
    weights and of 1 x 128 elsewhere, MXFP8BlockScaling of 1 x 32 with powers of two,
    Float8CurrentScaling one scale for all; hybrid has gradients in e5m2. `delayed` takes scales
    from steps before, and cannot be emulated by one.
    """

    def __init__(self, recipe: str, hybrid: bool) -> None:
        self._recipe, self._hybrid = recipe, hybrid

    def weight(self, values: Tensor) -> Tensor:
        """A weight, or its transpose."""
        if self._recipe == "blockwise":
            return _rounded(values, BlockScaling(128, 128))
        return self.activation(values)

    def activation(self, values: Tensor) -> Tensor:
        """Inputs, or their transpose."""
        return _rounded(values, self._scaling(values))

    def gradient(self, values: Tensor) -> Tensor:
        """Gradients of outputs, or their transpose."""
        return _rounded(values, self._scaling(values), e5m2=self._hybrid)

    def _scaling(self, values: Tensor) -> BlockScaling:
        if self._recipe == "blockwise":
            return BlockScaling(1, 128)
        if self._recipe == "mxfp8":
            return BlockScaling(1, 32, "power_of_two")
        return BlockScaling(*values.shape)


def _rounded(values: Tensor, scaling: BlockScaling, e5m2: bool = False) -> Tensor:
    """The float32 numbers that float8 stands for."""
    if values.numel() == 0:
        return values.to(torch.float32)
    float8, scales = quantize(values, scaling)
    if not e5m2:
        return dequantize(float8, scales, scaling, torch.float32)
    ones = torch.ones_like(values, dtype=torch.float8_e4m3fn)
    each = dequantize(ones, scales, scaling, torch.float32) * (E4M3_MAX / E5M2_MAX)
    return (values.to(torch.float32) / each).to(torch.float8_e5m2).to(torch.float32) * each


class _Product(torch.autograd.Function):
    """Inputs [T, C] times a weight [R, C], and the two products of its gradient, each rounded."""

    @staticmethod
    def forward(ctx: Any, input_TC: Tensor, weight_RC: Tensor, rounding: Rounding) -> Tensor:
        ctx.save_for_backward(input_TC, weight_RC)
        ctx.rounding = rounding
        product = rounding.activation(input_TC) @ rounding.weight(weight_RC).T
        return product.to(input_TC.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient_TR,) = gradients
        input_TC, weight_RC = ctx.saved_tensors
        rounding = ctx.rounding
        of_input = rounding.gradient(gradient_TR) @ rounding.weight(weight_RC.T).T
        of_weight = rounding.gradient(gradient_TR.T) @ rounding.activation(input_TC.T).T
        return of_input.to(input_TC.dtype), of_weight.to(weight_RC.dtype), None


def _multiply(rounding: Rounding, input_: Tensor, weight: Tensor) -> Tensor:
    flat = _Product.apply(input_.reshape(-1, input_.shape[-1]), weight, rounding)
    return flat.view(*input_.shape[:-1], weight.shape[0])


def _parallel(
    rounding: Rounding,
    input: Tensor,  # noqa: A002  as Megatron calls it
    weight: Tensor,
    bias: Tensor | None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any,
    **kwargs: object,
) -> Tensor:
    """In place of `linear_with_grad_accumulation_and_async_allreduce`."""
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, group=tp_group)  # noqa: A001
    elif allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)  # noqa: A001
    product = _multiply(rounding, input, weight)
    return product if bias is None else product + bias


def _whole(rounding: Rounding, linear: Any, input_: Tensor) -> tuple[Tensor, None]:
    return _multiply(rounding, input_, linear.weight), None


def _grouped(
    rounding: Rounding, linear: Any, input_: Tensor, tokens_per_expert: list[int]
) -> tuple[Tensor, None]:
    parts = zip(input_.split(tokens_per_expert), linear.parameters(), strict=True)
    return torch.cat([_multiply(rounding, part, weight) for part, weight in parts]), None


@contextlib.contextmanager
def emulated(
    model: Any, rounding: Rounding, bf16_layers: tuple[int, int] = (0, 0)
) -> Iterator[int]:
    """While open, the linears of `model`'s decoder layers compute as in FP8; yields their number.

    `bf16_layers` at the start and at the end are left out.
    """
    first, last = bf16_layers
    changed: list[tuple[Any, str]] = []
    for layer in (module for module in model.modules() if isinstance(module, TransformerLayer)):
        index = layer.layer_number - 1
        if first <= index < layer.config.num_layers - last:
            changed += [
                _change(module, rounding) for module in layer.modules() if _is_linear(module)
            ]
    try:
        yield len(changed)
    finally:
        for module, name in changed:
            delattr(module, name)


_PARALLEL = (ColumnParallelLinear, RowParallelLinear)
_GROUPED = (ColumnGroupedLinear, RowGroupedLinear)


def _is_linear(module: object) -> bool:
    return isinstance(module, (*_PARALLEL, *_GROUPED, WholeLinear))


def _change(module: Any, rounding: Rounding) -> tuple[Any, str]:
    """Have the instance compute otherwise; returns what to delete of it afterwards."""
    if isinstance(module, _PARALLEL):
        module._forward_impl = partial(_parallel, rounding)
        return module, "_forward_impl"
    by_kind = _grouped if isinstance(module, _GROUPED) else _whole
    module.forward = partial(by_kind, rounding, module)
    return module, "forward"
