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
from megarl.actor.families.family import Family, Kind, Weight
from megarl.actor.model_shape import ModelShape
from megarl.errors import LayoutError

Precision = Literal["policy", "float32", "float8"]
"""Of a parameter: the policy's own, or whatever that is, float32, or float8 in scaled blocks."""

STACKED = "*"  # stands in a parameter's name where each expert's tensor has its number
SCALE_SUFFIX = "_scale_inv"  # a block-quantized tensor's scales, in checkpoints and in SGLang
HEAD_NAME = "lm_head.weight"  # in checkpoints of all families; a tied one is the embedding again
SWITCHED: Mapping[str, tuple[Kind, ...]] = {
    "qkv_bias": ("query_bias", "key_bias", "value_bias"),
    "qk_norm": ("query_norm", "key_norm"),
    "low_rank_queries": ("query_down", "query_down_norm", "query_up", "kv_down"),
    "full_rank_queries": ("query_full", "kv_down_alone"),
    "shared_experts": ("shared_gate", "shared_up", "shared_down"),
    "router_bias": ("router_bias",),
}
"""Kinds that a policy has or has not by its shape, by what decides. All others it always has."""

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
    return precision_bytes(parameter.precision, policy_bytes)


def precision_bytes(precision: Precision, policy_bytes: int) -> int:
    """Bytes of one element in a precision, where one in the policy's has `policy_bytes`."""
    return FIXED_BYTES.get(precision, policy_bytes)


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
    followed by its scales, one for a block. Raises LayoutError where such a block has no elements,
    where the family's own table contradicts its fields (`check_family`), and where the shape has
    what the family never has.
    """
    if fp8_block is not None:
        check_fp8_block(fp8_block)
    family = FAMILIES[shape.architecture]
    check_family(family)
    _check_rules(shape, family)
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


def check_family(family: Family) -> None:
    """Refuse a table with tensors that no policy of the family would have.

    Kinds in `SWITCHED` are there only where the shape says so. Under a family whose fields say
    never they would be left out on all sides, and a plan without them would be proved. Raises
    LayoutError for those, and for a kind that stands twice in a block.
    """
    latent, deepseek = family.attention == "latent", family.experts == "deepseek"
    rules = {
        "qkv_bias": (family.qkv_bias is not False, "qkv_bias=False"),
        "qk_norm": (family.qk_norm is not False, "qk_norm=False"),
        "low_rank_queries": (latent, f"attention={family.attention!r}"),
        "full_rank_queries": (latent, f"attention={family.attention!r}"),
        "shared_experts": (deepseek, f"experts={family.experts!r}"),
        "router_bias": (deepseek, f"experts={family.experts!r}"),
    }
    never = {
        kind: field
        for switch, (possible, field) in rules.items()
        if not possible
        for kind in SWITCHED[switch]
    }
    for block, part in family.blocks.items():
        seen: set[Kind] = set()
        for weight in part.weights:
            where = f"family {family.architecture}, block {block}: {weight.name}"
            if weight.kind in seen:
                raise LayoutError(
                    f"{where} is a second tensor of kind {weight.kind!r}; give each its own kind"
                )
            seen.add(weight.kind)
            if weight.kind in never:
                raise LayoutError(
                    f"{where} is of kind {weight.kind!r}, and {never[weight.kind]} says that there "
                    "never is one, so no engine would be sent it; change that field, leave the "
                    "tensor out, or give it a kind of another name (docs/adding-a-model.md)"
                )


def _check_rules(shape: ModelShape, family: Family) -> None:
    """Refuse a shape with biases or norms that its family's table has no tensors for."""
    for field, found, rule in (
        ("qkv_bias", shape.qkv_bias, family.qkv_bias),
        ("qk_norm", shape.qk_norm, family.qk_norm),
    ):
        if found and rule is False:
            raise LayoutError(
                f"{field} of the shape is True, and family {family.architecture} has {field}=False;"
                " give the shape that read_shape reads, or change the family"
            )


def check_fp8_block(block: tuple[int, int]) -> None:
    """Raise LayoutError where a float8 block of [rows, columns] has no elements."""
    if min(block) < 1:
        raise LayoutError(f"fp8_block is {block}; give rows and columns of a block, from 1 up")


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
    moe, mla = shape.moe, shape.mla
    low_rank = mla is not None and mla.q_lora_rank is not None
    has = {
        "qkv_bias": shape.qkv_bias,
        "qk_norm": shape.qk_norm,
        "low_rank_queries": low_rank,
        "full_rank_queries": mla is not None and not low_rank,
        "shared_experts": moe is not None and moe.shared_intermediate_size > 0,
        "router_bias": moe is not None and moe.router_bias,
    }
    return {kind: has[switch] for switch, kinds in SWITCHED.items() for kind in kinds}


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
