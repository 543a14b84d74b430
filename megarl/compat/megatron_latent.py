"""Latent attention built of the classes that its spec names, on CPUs and on GPUs.

Owns the change of one choice of Megatron's: it puts a norm, with a weight that no policy has, in
front of full-rank queries (Moonlight's) wherever keys and values are normed, and finds a linear
with its norm inside only in Transformer Engine. Import it after `megatron_cpu.install()`.

For: megatron-core 0.19.2. Ends when its QKNormConfigResolver takes what a spec says.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)

_CHOSEN = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Megatron's latent attention, each part of the class in its spec."""

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        return {name: getattr(submodules, name) or IdentityOp for name in _CHOSEN}
