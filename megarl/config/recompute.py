"""The settings of activation recomputation, and what Megatron calls them.

What keeps them from meaning what they say is in `check_recompute.py`.
"""

from __future__ import annotations

from typing import Any, Literal

from megarl.config.group import Group, Positive

Module = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]


class RecomputeConfig(Group):
    """Activations that are computed again in the backward pass instead of being kept: memory for
    time, the same gradients. Megatron-Core's recompute_* fields."""

    granularity: Literal["none", "selective", "full"] = "none"
    """`none`: all activations are kept; `selective`: but for what is inside `modules`; `full`: only
    the inputs of whole decoder layers are kept, as `method` says."""
    method: Literal["uniform", "block"] = "uniform"
    """Of `full`. `uniform`: the input of every `num_layers` layers is kept, and all are computed
    again; `block`: the first `num_layers` layers of each model chunk are computed again, each from
    its input, and the others keep their activations."""
    num_layers: Positive = 1
    """Of `full`: decoder layers, as `method` says."""
    modules: list[Module] = ["core_attn"]
    """Of `selective`. `core_attn`: attention between its linears (Transformer Engine's fused one
    keeps little as it is); `layernorm`: norms that are not inside a linear, those of latent
    attention and experts; `mla_up_proj`: latent attention's projections up and its rope; `mlp`:
    dense MLPs; `moe`: router and experts; `moe_act`: the experts' activation function;
    `shared_experts`."""


def recompute_fields(recompute: RecomputeConfig) -> dict[str, Any]:
    """Megatron's fields.

    >>> recompute_fields(RecomputeConfig())["recompute_granularity"] is None
    True
    >>> fields = recompute_fields(RecomputeConfig(granularity="full", num_layers=2))
    >>> fields["recompute_method"], fields["recompute_num_layers"]
    ('uniform', 2)
    """
    kind = recompute.granularity
    return {
        "recompute_granularity": None if kind == "none" else kind,
        "recompute_method": recompute.method if kind == "full" else None,
        "recompute_num_layers": recompute.num_layers if kind == "full" else None,
        "recompute_modules": list(recompute.modules) if kind == "selective" else None,
    }
