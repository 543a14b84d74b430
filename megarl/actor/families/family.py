"""What a model family is: its parameters' kinds, their names on three sides, its config's rules.

Owns the types; the families themselves are data in the modules beside this one. Knows nothing of
parallelism. `{layer}` in a name is the layer's number: global for Hugging Face and SGLang, counted
from 0 on each pipeline stage for Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "embedding",
    "attention_norm",
    "query",
    "key",
    "value",
    "query_bias",
    "key_bias",
    "value_bias",
    "query_norm",
    "key_norm",
    "attention_output",
    "mlp_norm",
    "gate",
    "up",
    "down",
    "final_norm",
    "head",
]


@dataclass(frozen=True, slots=True)
class Names:
    """One kind of parameter by its names. Fused tensors have one name for several kinds."""

    hf: str
    megatron: str
    sglang: str


@dataclass(frozen=True, slots=True)
class Family:
    """One `architectures` entry that megarl computes.

    `fixed` are config fields that change the mathematics, with the values that both engines are
    known to compute alike; any other value is refused. `harmless` are fields that matter only
    beside one of those. `head_dim` and `kv_heads` say what an absent field means: "derived" is
    hidden_size / num_attention_heads, "heads" is num_attention_heads, "required" is an error.
    """

    architecture: str
    model_type: str
    qkv_bias: bool
    qk_norm: bool
    head_dim: int | Literal["derived"]
    kv_heads: Literal["heads", "required"]
    fixed: Mapping[str, tuple[object, ...]]
    harmless: frozenset[str]
    names: Mapping[Kind, Names]
