"""The settings of number formats that the learner computes in.

What they mean for Megatron and Transformer Engine is in `fp8.py`, what keeps them from running in
`check_fp8.py`.
"""

from __future__ import annotations

from typing import Literal

from megarl.config.group import Group, NonNegative, Positive


class PrecisionConfig(Group):
    """Number formats of the learner. FP8 needs Transformer Engine and a GPU for the recipe
    (docs/fp8.md)."""

    params: Literal["fp32", "bf16"] = "bf16"
    """Format of weights and activations, in learner and rollout. The optimizer keeps fp32
    masters."""
    fp8: Literal["off", "hybrid", "e4m3"] = "off"
    """Format of the linear layers' products. `hybrid`: weights and activations in e4m3, gradients
    in e5m2; `e4m3`: all in e4m3; `off`: as `params`. Embedding, output layer, norms, routers and
    attention are as `params` in any case."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "blockwise"
    """Where scales come from. `delayed`: one for each tensor, from the largest magnitudes of steps
    before; `tensorwise`: one for each tensor, from itself; `blockwise`: of 128 numbers, of weights
    128 x 128, as float8 servers have them (Hopper); `mxfp8`: of 32 numbers (Blackwell)."""
    fp8_param: bool = False
    """Keep the weights themselves in FP8 between steps, with `fp8_param_gather`. A run cannot do it
    yet (docs/fp8.md)."""
    fp8_param_gather: bool = False
    """Gather updated weights over data-parallel ranks in FP8, with `fp8_param`."""
    fp8_first_layers_bf16: NonNegative = 0
    """So many decoder layers at the start stay in bf16. Not with `delayed`."""
    fp8_last_layers_bf16: NonNegative = 0
    """So many decoder layers at the end stay in bf16. Not with `delayed`."""
    fp8_amax_history: Positive = 1024
    """`delayed`: steps whose largest magnitudes are remembered."""
    fp8_amax_algorithm: Literal["max", "most_recent"] = "max"
    """`delayed`: which of the remembered magnitudes makes the scale."""
    fp8_amax_group: Literal["replicas", "tensor"] = "replicas"
    """`delayed`: ranks that agree on a tensor's largest magnitude: tensor, context and
    data-parallel ranks together, or (`tensor`) those of one replica, which costs less and lets
    replicas differ."""

    @property
    def uses_fp8(self) -> bool:
        """Whether any layer computes in FP8."""
        return self.fp8 != "off"
