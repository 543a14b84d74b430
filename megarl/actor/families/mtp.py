"""The multi-token prediction layer: one more decoder layer with its own entry and final norm.

Data only. In a checkpoint it is layer num_hidden_layers. Megatron's names are those of its
MultiTokenPredictionLayer, megatron-core 0.19; SGLang holds it in the draft model only
(deepseek_nextn, glm4_moe_nextn, sglang 0.5), which has one.
"""

from __future__ import annotations

from megarl.actor.families.dense import HF
from megarl.actor.families.family import Held, Part, Weight

MEGATRON_MTP = "mtp.layers.{layer}."
MEGATRON_LAYER = f"{MEGATRON_MTP}mtp_model_layer."
SGLANG_MTP = "model."
SGLANG_LAYER = f"{SGLANG_MTP}decoder."

_NORMS = {
    "mtp_embedding_norm": ("enorm", "enorm", "enorm"),
    "mtp_hidden_norm": ("hnorm", "hnorm", "hnorm"),
    "mtp_final_norm": ("shared_head.norm", "final_layernorm", "shared_head.norm"),
}

ENTRY_AND_FINAL_NORM = Part(
    (
        *(Weight(k, f"{HF}{hf}.weight", ("hidden",)) for k, (hf, _, _) in _NORMS.items()),
        Weight("mtp_projection", f"{HF}eh_proj.weight", ("hidden", "two_hidden")),
    ),
    (
        *(Held(f"{MEGATRON_MTP}{m}.weight", "whole", (k,)) for k, (_, m, _) in _NORMS.items()),
        Held(f"{MEGATRON_MTP}eh_proj.weight", "rows", ("mtp_projection",)),
    ),
    (
        *(Held(f"{SGLANG_MTP}{s}.weight", "whole", (k,)) for k, (_, _, s) in _NORMS.items()),
        Held(f"{SGLANG_MTP}eh_proj.weight", "whole", ("mtp_projection",)),
    ),
)

DUPLICATES = (f"{HF}embed_tokens.weight", f"{HF}shared_head.head.weight")
"""The checkpoint's second copies of the embedding and the head, which the layer shares."""
