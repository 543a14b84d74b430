"""Float8 in square blocks on a CPU without AMX: the forward pass that SGLang has on GPUs only.

Owns three methods and one function of SGLang's there. SGLang's own form on a CPU packs the weights
for AMX kernels, and refuses without them ("Fp8LinearMethod on CPU requires that CPU has AMX
support"). Here weights and scales stay as they were loaded, which is what a GPU before Blackwell
keeps, and are multiplied out before each matrix product; activations stay in the server's dtype, as
with SGLang's AMX kernels, where GPU kernels quantize them too.

For: sglang 0.5.23 (https://github.com/sgl-project/sglang), layers/quantization/fp8.py and
models/deepseek_common/deepseek_weight_loader.py. Ends when SGLang serves float8 on such CPUs.
"""

from __future__ import annotations

from typing import Any

from megarl.compat.after_import import after_import

QUANTIZATION = "sglang.srt.layers.quantization.fp8"
LATENT = "sglang.srt.models.deepseek_common.deepseek_weight_loader"


def install() -> None:
    """Change SGLang's methods once their modules are imported. For CPU servers only."""
    after_import(QUANTIZATION, _serve)
    after_import(LATENT, _keep_latent_weights)


def _serve(module: Any) -> None:
    if module._is_cpu_amx_available:
        return
    for method, apply in (
        (module.Fp8LinearMethod, _linear),
        (module.Fp8MoEMethod, _experts),
    ):
        method.process_weights_after_loading_block_quant = _as_loaded
        method.apply = _in_blocks(apply)


def _as_loaded(self: Any, layer: Any) -> None:
    """Leave weights and scales alone."""


def _in_blocks(apply: Any) -> Any:
    """A method's `apply`, for float8 in blocks alone: NotImplementedError for any other."""

    def checked(self: Any, layer: Any, *inputs: Any, **more: Any) -> Any:
        if not self.block_quant or self.use_mxfp8:
            raise NotImplementedError(
                "megarl serves float8 on a CPU in square blocks with float32 scales only; give the "
                "model's quantization_config a weight_block_size, or use a GPU"
            )
        return apply(self, layer, *inputs, **more)

    return checked


def _multiplied(weight: Any, scales: Any, block: Any, dtype: Any) -> Any:
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    return block_quant_dequant(weight, scales, block, dtype)


def _linear(self: Any, layer: Any, x: Any, bias: Any = None) -> Any:
    from torch.nn import functional as F

    block = self.weight_block_size
    return F.linear(x, _multiplied(layer.weight, layer.weight_scale_inv, block, x.dtype), bias)


class _Experts:
    """What SGLang's native experts ask of their layer, with weights that are multiplied out."""

    def __init__(self, layer: Any, block: Any, dtype: Any) -> None:
        self.num_experts, self.moe_ep_size = layer.num_experts, layer.moe_ep_size
        self.w13_weight = _multiplied(layer.w13_weight, layer.w13_weight_scale_inv, block, dtype)
        self.w2_weight = _multiplied(layer.w2_weight, layer.w2_weight_scale_inv, block, dtype)


def _experts(self: Any, layer: Any, dispatch_output: Any) -> Any:
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x = dispatch_output.hidden_states
    mine = _Experts(layer, self.weight_block_size, x.dtype)
    # By its module: expert parallelism is another compat file's change of it.
    output = fused_moe_native.moe_forward_native(
        mine, x, dispatch_output.topk_output, self.moe_runner_config
    )
    return StandardCombineInput(hidden_states=output)


def _keep_latent_weights(module: Any) -> None:
    """Multiply kv_b_proj out for the absorbed products, as SGLang does on CUDA.

    On a CPU SGLang quantizes it anew, to one scale for the whole, for a kernel that CPUs lack.
    """
    import torch

    whole = module.block_quant_to_tensor_quant

    def block_quant_to_tensor_quant(weight: Any, scales: Any, block: Any) -> Any:
        if weight.device.type != "cpu":
            return whole(weight, scales, block)
        return _multiplied(weight, scales, block, torch.bfloat16), None

    module.block_quant_to_tensor_quant = block_quant_to_tensor_quant
