"""The parameter table: every tensor of the policy under its Hugging Face name, once.

Owns names and global shapes, block by block. Knows nothing of where a tensor is held.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from megarl.actor.families import FAMILIES
from megarl.actor.families.family import Kind, Weight
from megarl.actor.shape import ModelShape

Precision = Literal["policy", "float32", "float8"]
"""Of a parameter: the policy's own, or whatever that is, float32, or float8 in scaled blocks."""

STACKED = "*"  # stands in a parameter's name where each expert's tensor has its number
SCALE_SUFFIX = "_scale_inv"  # a block-quantized tensor's scales, in checkpoints and in SGLang
HEAD_NAME = "lm_head.weight"  # in checkpoints of all families; a tied one is the embedding again
FIXED_BYTES: Mapping[Precision, int] = {"float32": 4, "float8": 1}  # whatever the policy's are


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of the policy. `layer` is None outside the decoder layers.

    The tensors of a layer's routed experts are one parameter with a leading dim of experts and `*`
    in its name.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    layer: int | None = None
    precision: Precision = "policy"
    quantized: bool = False

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)

    @property
    def stacked(self) -> bool:
        """Whether it stands for one checkpoint tensor per expert."""
        return STACKED in self.name

    def stored_names(self) -> tuple[str, ...]:
        """The names of its tensors in a Hugging Face checkpoint, by expert where it is a stack.

        >>> Parameter("mlp.experts.*.up_proj.weight", (2, 8, 4), "expert_up").stored_names()
        ('mlp.experts.0.up_proj.weight', 'mlp.experts.1.up_proj.weight')
        """
        if not self.stacked:
            return (self.name,)
        return tuple(self.name.replace(STACKED, str(i)) for i in range(self.shape[0]))


def element_bytes(parameter: Parameter, policy_bytes: int) -> int:
    """Bytes of one element, where one in the policy's precision has `policy_bytes`.

    >>> element_bytes(Parameter("norm", (8,), "norm"), 2)
    2
    >>> element_bytes(Parameter("bias", (8,), "router_bias", precision="float32"), 2)
    4
    """
    return FIXED_BYTES.get(parameter.precision, policy_bytes)


@dataclass(frozen=True, slots=True)
class Block:
    """One unit of the model: its kind, and its layer number where it has one."""

    kind: str
    layer: int | None = None

    def name(self, template: str) -> str:
        """A name of the block's kind with this block's number.

        >>> Block("dense", 3).name("model.layers.{layer}.mlp.up_proj.weight")
        'model.layers.3.mlp.up_proj.weight'
        """
        return template if self.layer is None else template.replace("{layer}", str(self.layer))


@dataclass(frozen=True)
class BlockTable:
    """The parameters of a model: its blocks in order, and each kind's parameters, once.

    In a kind's parameters the names hold `{layer}` and `layer` is None. `duplicates` are names
    that a checkpoint may hold besides: tensors that repeat a parameter, which nobody reads.
    """

    blocks: tuple[Block, ...]
    kinds: Mapping[str, tuple[Parameter, ...]]
    duplicates: tuple[str, ...] = ()

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters, in the order of the forward pass."""
        return tuple(parameter for block in self.blocks for parameter in self.of(block))

    def of(self, block: Block) -> Iterator[Parameter]:
        """One block's parameters under their full names."""
        for parameter in self.kinds[block.kind]:
            yield replace(parameter, name=block.name(parameter.name), layer=block.layer)


def parameter_table(
    shape: ModelShape, fp8_block: tuple[int, int] | None = None
) -> tuple[Parameter, ...]:
    """All parameters in the order of the forward pass. Tied embeddings are one parameter."""
    return block_table(shape, fp8_block).parameters


def block_table(shape: ModelShape, fp8_block: tuple[int, int] | None = None) -> BlockTable:
    """The blocks of the policy and the parameters of each kind of block.

    With `fp8_block` the quantized tensors are float8 in blocks of so many [rows, columns], each
    followed by its scales, one for a block.
    """
    family = FAMILIES[shape.architecture]
    blocks = _blocks(shape)
    known, flags = sizes(shape), _flags(shape)
    kinds: dict[str, tuple[Parameter, ...]] = {}
    for kind in dict.fromkeys(block.kind for block in blocks):
        table: list[Parameter] = []
        for weight in family.blocks[kind].weights:
            if flags.get(weight.kind, True):
                table += _parameters(weight, known, fp8_block)
        kinds[kind] = tuple(table)
    duplicates = tuple(
        block.name(name) for block in blocks if block.kind == "mtp" for name in family.duplicates
    )
    return BlockTable(blocks, kinds, duplicates)


def sizes(shape: ModelShape) -> dict[str, int]:
    """The sizes that tables name their dims by."""
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    known = {
        "hidden": shape.hidden_size,
        "vocab": shape.vocab_size,
        "inner": shape.intermediate_size,
        "head": shape.head_dim,
        "query": heads * shape.head_dim * (2 if shape.attention_output_gate else 1),
        "kv": kv_heads * shape.head_dim,
        "attention": heads * shape.head_dim,
        "two_hidden": 2 * shape.hidden_size,
        "one": 1,
    }
    if shape.mla is not None:
        mla = shape.mla
        known |= {
            "q_lora": mla.q_lora_rank or 0,
            "kv_lora": mla.kv_lora_rank,
            "kv_down": mla.kv_lora_rank + mla.qk_rope_head_dim,
            "query": heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim),
            "kv_up": heads * (mla.qk_nope_head_dim + mla.v_head_dim),
            "attention": heads * mla.v_head_dim,
        }
    if shape.moe is not None:
        known |= {
            "experts": shape.moe.num_experts,
            "expert_inner": shape.moe.expert_intermediate_size,
            "shared_inner": shape.moe.shared_intermediate_size,
        }
    return known


def _flags(shape: ModelShape) -> dict[Kind, bool]:
    """For kinds that a family may or may not have: whether this policy has them."""
    bias, norm, moe, mla = shape.qkv_bias, shape.qk_norm, shape.moe, shape.mla
    low_rank = mla is not None and mla.q_lora_rank is not None
    shared = moe is not None and moe.shared_intermediate_size > 0
    return {
        **dict.fromkeys(("query_bias", "key_bias", "value_bias"), bias),
        **dict.fromkeys(("query_norm", "key_norm"), norm),
        **dict.fromkeys(("query_down", "query_down_norm", "query_up", "kv_down"), low_rank),
        **dict.fromkeys(("query_full", "kv_down_alone"), mla is not None and not low_rank),
        **dict.fromkeys(("shared_gate", "shared_up", "shared_down"), shared),
        "router_bias": moe is not None and moe.router_bias,
    }


def _blocks(shape: ModelShape) -> tuple[Block, ...]:
    layers = [Block(kind, layer) for layer, kind in enumerate(shape.layer_kinds)]
    mtp = [Block("mtp", shape.num_layers + j) for j in range(shape.num_mtp_layers)]
    head = [] if shape.tie_embeddings else [Block("head")]
    return (Block("embedding"), *layers, Block("final_norm"), *head, *mtp)


def _parameters(
    weight: Weight, known: Mapping[str, int], fp8_block: tuple[int, int] | None
) -> list[Parameter]:
    """The weight's parameter, and its scales where it is quantized."""
    name = weight.name.replace("{expert}", STACKED)
    stack = (known["experts"],) if "{expert}" in weight.name else ()
    dims = tuple(known[dim] for dim in weight.dims)
    if weight.quantized and fp8_block is not None:
        scales = tuple(-(-size // unit) for size, unit in zip(dims, fp8_block, strict=True))
        return [
            Parameter(name, stack + dims, weight.kind, None, "float8", True),
            Parameter(
                name + SCALE_SUFFIX, stack + scales, weight.kind + SCALE_SUFFIX, None, "float32"
            ),
        ]
    precision: Precision = "float32" if weight.float32 else "policy"
    return [Parameter(name, stack + dims, weight.kind, None, precision, weight.quantized)]
