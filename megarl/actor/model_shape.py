"""The shape of the policy: what the engines and the layouts need to know of it but its weights.

Owns the values and their form in JSON. Knows nothing of config files, parallelism or engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3's frequency scaling of rotary embeddings: long wavelengths are divided by `factor`.

    Its other constants are Megatron's: low 1, high 4, original length 8192.
    """

    factor: float


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN's scaling of rotary embeddings, with DeepSeek's two factors of the softmax scale.

    Wavelengths that turn less than `beta_slow` times in `original_max_positions` are stretched by
    `factor`, those that turn more than `beta_fast` times are not. Source: Peng et al. 2023, 3.2.
    """

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2): queries, keys and values through low ranks.

    `q_lora_rank` is None where queries are projected at full rank.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """The routed experts of the layers that have them. `shared_intermediate_size` 0 is none.

    `router_bias` is the per-expert correction of DeepSeek-V3 (e_score_correction_bias).
    `dense_layers` have one MLP instead. The other fields say how the router chooses: `scoring` is
    "softmax" or "sigmoid", `normalize` makes the chosen scores sum to 1 before `scaling`.
    """

    num_experts: int
    experts_per_token: int
    expert_intermediate_size: int
    shared_intermediate_size: int
    router_bias: bool
    scoring: str
    normalize: bool
    scaling: float
    num_groups: int
    groups_per_token: int
    dense_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything that the engines and the layouts need to know about the policy but its weights.

    With latent attention `num_kv_heads` is `num_heads` and `head_dim` the width of a query or key.
    `rotary_fraction` is the part of a head that is rotated. `fp8_block` is [rows, columns] of the
    blocks that the checkpoint's float8 tensors are scaled in.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | Yarn | None
    max_positions: int
    rotary_fraction: float = 1.0
    attention_output_gate: bool = False
    mla: LatentAttention | None = None
    moe: MixtureOfExperts | None = None
    num_mtp_layers: int = 0
    fp8_block: tuple[int, int] | None = None

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """For each decoder layer, "dense" or "moe"."""
        if self.moe is None:
            return ("dense",) * self.num_layers
        dense = self.moe.dense_layers
        return tuple("dense" if i in dense else "moe" for i in range(self.num_layers))

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> ModelShape:
        """The inverse of `to_dict`, also after JSON has made lists of the tuples."""
        rope, mla, moe = (values.get(name) for name in ("rope_scaling", "mla", "moe"))
        nested: dict[str, object] = {}
        if isinstance(rope, Mapping):
            nested["rope_scaling"] = Yarn(**rope) if "beta_fast" in rope else Llama3Rope(**rope)
        if isinstance(mla, Mapping):
            nested["mla"] = LatentAttention(**mla)
        if isinstance(moe, Mapping):
            dense = tuple(moe["dense_layers"])
            nested["moe"] = MixtureOfExperts(**{**moe, "dense_layers": dense})
        block = values.get("fp8_block")
        if isinstance(block, list | tuple):
            nested["fp8_block"] = tuple(block)
        return cls(**{**values, **nested})  # type: ignore[arg-type]
