"""Expert parallelism in SGLang's native MoE layer, which a CPU without AMX uses.

Owns that layer where a rank holds some of the experts. SGLang gives it -1 for the experts of other
ranks and counts tokens by scattering into a table with that index, which fails at the first forward
pass ("index -1 is out of bounds for dimension 1 with size 8"). Layers with all experts keep
SGLang's own function.

For: sglang 0.5.23 (https://github.com/sgl-project/sglang), layers/moe/fused_moe_native.py. Ends
when `moe_forward_native` leaves out the experts of other ranks.
"""

from __future__ import annotations

from typing import Any

from megarl.compat.after_import import after_import

MODULE = "sglang.srt.layers.moe.fused_moe_native"


def install() -> None:
    """Wrap SGLang's function once its module is imported. For CPU servers only."""
    after_import(MODULE, _wrap)


def _wrap(module: Any) -> None:
    whole = module.moe_forward_native

    def moe_forward_native(layer: Any, x: Any, topk_output: Any, config: Any) -> Any:
        if layer.moe_ep_size == 1:
            return whole(layer, x, topk_output, config)
        return _local_experts(layer, x, topk_output, config)

    module.moe_forward_native = moe_forward_native


def _local_experts(layer: Any, x: Any, topk_output: Any, config: Any) -> Any:
    """The weighted sum over this rank's experts [tokens, hidden]; the ranks' sums are added later.

    Raises NotImplementedError for a layer that is more than two gated matrices with SiLU.
    """
    import torch
    from torch.nn import functional as F

    plain = config.activation == "silu" and config.gemm1_alpha is None
    if not plain or config.apply_router_weight_on_input or hasattr(layer, "w13_weight_bias"):
        raise NotImplementedError(
            "megarl serves expert parallel layers on a CPU with SiLU and without biases only; use "
            "rollout.parallel.ep = 1, or a GPU"
        )
    weights, ids, out = topk_output.topk_weights, topk_output.topk_ids, torch.zeros_like(x)
    for expert in range(layer.w13_weight.shape[0]):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], layer.w13_weight[expert]).chunk(2, -1)
        mine = F.linear(F.silu(gate) * up, layer.w2_weight[expert])
        out.index_add_(0, token, mine * weights[token, slot, None].to(x.dtype))
    return out
