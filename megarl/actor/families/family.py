"""What a model family is: its tensors on three sides as one table, and its config's rules.

Owns the types; the families themselves are data in the modules beside this one. Knows nothing of
how many ranks there are. In a name, `{layer}` is the layer's number (global for Hugging Face and
SGLang, counted from 0 on each pipeline stage for Megatron) and `{expert}` the expert's (global for
Hugging Face, counted from 0 on each rank for engines).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = str
"""What a tensor is in its block, for example "query" or "router_bias"; unique in the block.

Any word but those of `SWITCHED` in `actor/parameters.py`, which say what they mean there.
"""

Cut = Literal["whole", "rows", "columns", "vocabulary", "grouped_qkv", "heads_qkv"]
"""How one local tensor is cut from one or more tensors of the policy.

whole: on every rank, several kinds below one another. rows: the rank's rows of each kind, below
one another (column parallel). columns: the rank's columns (row parallel). vocabulary: rows, with
padding behind the vocabulary. grouped_qkv: the rank's rows of Megatron's fused tensor, group by
group [queries, (gates,) key, value]. heads_qkv: SGLang's: this rank's queries, keys, values.
"""

Axis = Literal["attention", "mlp", "experts", "shared_experts", "vocabulary"]
"""Over which ranks a tensor is cut, by its role in the model; an engine's layout says how many."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of the policy: its Hugging Face name and its dims by the names of `sizes`.

    With `{expert}` in the name it is one of a stack: there is one for each routed expert. `float32`
    tensors keep that precision whatever the policy's is; `quantized` ones are stored in blocks with
    scales in an FP8 checkpoint.
    """

    kind: Kind
    name: str
    dims: tuple[str, ...]
    float32: bool = False
    quantized: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """One local tensor of an engine: its name there, and how it is cut from which kinds.

    It exists where the policy has its kinds, and where all its `forms` are among the forms that
    the layout is asked for. For Megatron these are the layer spec ("te" or "local") and how it
    keeps routed experts: "per_expert" (TEGroupedMLP), "grouped" (the same with
    moe_single_grouped_weight) or "sequential" (SequentialMLP). `buffer` marks what is in
    named_buffers() instead of named_parameters(); `float32` what the engine keeps in that
    precision though the policy does not, so that it is cast on arrival; `reshard/engine_tensors.py`
    says both of a rank's tensors.
    """

    name: str
    cut: Cut
    kinds: tuple[Kind, ...]
    axis: Axis = "attention"
    forms: tuple[str, ...] = ()
    buffer: bool = False
    float32: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """Some tensors of a block on three sides. Parts add up to blocks."""

    weights: tuple[Weight, ...] = ()
    megatron: tuple[Held, ...] = ()
    sglang: tuple[Held, ...] = ()

    def __add__(self, other: Part) -> Part:
        return Part(
            self.weights + other.weights,
            self.megatron + other.megatron,
            self.sglang + other.sglang,
        )

    def without(self, *kinds: Kind) -> Part:
        """The same less these kinds and every local tensor that holds one of them."""
        return Part(
            tuple(weight for weight in self.weights if weight.kind not in kinds),
            *(
                tuple(held for held in side if not set(kinds).intersection(held.kinds))
                for side in (self.megatron, self.sglang)
            ),
        )


@dataclass(frozen=True, slots=True)
class FusesShared:
    """When SGLang, not asked, puts shared experts into slots behind the routed ones.

    `num_experts` are the numbers of routed experts with which it does, empty for any; `only_one`:
    of several shared experts none; `overlapped`: with --enable-two-batch-overlap and
    --enable-single-batch-overlap too. `enforced`: --enforce-shared-experts-fusion overrules these.
    Source: shared_experts_fusion_disable_reason of its models.
    """

    num_experts: tuple[int, ...] = ()
    only_one: bool = False
    overlapped: bool = True
    enforced: bool = False


@dataclass(frozen=True, slots=True)
class Served:
    """What SGLang's model of a family does in its own way, beside the tensors of its blocks.

    The defaults claim nothing, so what is not claimed is refused. `attention_dp`: its attention is
    cut over attn_tp_size, so it can be data parallel. `pipeline`: it can be cut into stages. `fp8`:
    it loads block-quantized weights with their scales (sglang 0.5.23's llama drops the scales).
    `tied` says what becomes of a tied head: a "copy" of the embedding on the last of several
    stages; served on "one_stage" only; or "never", where its loader leaves such a head empty.
    `dense_layers`: beside layers with experts it may have some without; `dense_whole`: these follow
    --moe-dense-tp-size 1. `all_to_all`: the values of --moe-a2a-backend with which its layout is
    known; its shared experts are then whole on every rank. `fuses_shared`: when they become slots,
    None for never.

    Facts of its stages, which matter where it has several: `head_everywhere`: its head is on every
    one, not on the last alone; `embeds_for_draft`: the last has the embedding too where a draft
    model is served.
    """

    attention_dp: bool = False
    pipeline: bool = False
    fp8: bool = False
    tied: Literal["copy", "one_stage", "never"] = "never"
    dense_layers: bool = False
    dense_whole: bool = False
    all_to_all: tuple[str, ...] = ()
    fuses_shared: FusesShared | None = None
    head_everywhere: bool = False
    embeds_for_draft: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """One `architectures` entry that megarl knows.

    `blocks` are the units that a model is made of: embedding, dense and moe (kinds of decoder
    layer), final_norm, head, mtp. `fixed` are config fields that change the mathematics, with the
    values that both engines are known to compute alike; any other value is refused. `harmless` are
    fields that matter only beside one of those. `head_dim` and `kv_heads` say what an absent field
    means: "derived" is hidden_size / num_attention_heads, "heads" is num_attention_heads,
    "required" is an error. `qkv_bias` and `qk_norm` are true for always, false for never, or the
    config field that says so; blocks with such kinds under false are refused (`check_family`).
    `ropes` are the rope_types that are read; `rotary_fraction` what an absent
    partial_rotary_factor means, None where it can only be 1. `attention` and `experts` say in
    whose fields a config describes them. `served` is what SGLang does in its own way. `trained`
    says whether the learner computes it; layouts, plans and conversion work for every family.
    `duplicates` are names of checkpoint tensors that repeat another: published checkpoints
    have them, nobody reads them. There `{layer}` is the number of a multi-token prediction layer.
    """

    architecture: str
    model_types: tuple[str, ...]
    qkv_bias: bool | Literal["attention_bias"]
    qk_norm: bool | Literal["use_qk_norm"]
    head_dim: int | Literal["derived"]
    kv_heads: Literal["heads", "required"]
    fixed: Mapping[str, tuple[object, ...]]
    harmless: frozenset[str]
    blocks: Mapping[str, Part]
    ropes: tuple[str, ...] = ("default",)
    rotary_fraction: float | None = None
    attention: Literal["grouped", "latent"] = "grouped"
    experts: Literal["none", "qwen3", "deepseek"] = "none"
    served: Served = Served()
    trained: bool = True
    duplicates: tuple[str, ...] = ()
