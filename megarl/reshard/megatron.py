"""The layout of Megatron-Core's GPTModel over tensor, pipeline, data and expert parallel ranks.

Owns Megatron's rules: interleaved grouped QKV, gated fc1, vocabulary padding, which stage holds
what, and the second copy of a tied embedding. Names are those of `named_parameters()` of the rank's
GPTModel. Source: megatron-core 0.19.2, attention.py, mlp.py, tensor_parallel/layers.py; the tests
compare with a real GPTModel.
"""

from __future__ import annotations

from megarl.actor.families import FAMILIES
from megarl.actor.families.family import Held
from megarl.actor.parameters import Parameter, block_table
from megarl.actor.shape import ModelShape
from megarl.errors import LayoutError
from megarl.reshard.layout import BlockLayout, Layout, RankLayout, ShardedTensor, Site
from megarl.reshard.mesh import LearnerMesh
from megarl.reshard.rules import Heads, cut_experts, cut_tensor

FORMS = ("te", "per_expert")


def megatron_layout(
    shape: ModelShape,
    mesh: LearnerMesh,
    vocab_divisor: int = 128,
    forms: tuple[str, ...] = FORMS,
) -> Layout:
    """All ranks of the learner; data-parallel replicas hold the same.

    `vocab_divisor` is Megatron's make-vocab-size-divisible-by. Raises LayoutError where a size does
    not divide.
    """
    check_divisible(shape, mesh)
    table = block_table(shape)
    kinds = {kind: i for i, kind in enumerate(table.kinds)}
    templates = [
        BlockLayout(kind, _tensors(shape, mesh, kind, parameters, vocab_divisor, forms))
        for kind, parameters in table.kinds.items()
    ]
    sites = []
    per_stage = shape.num_layers // mesh.pp
    for number, block in enumerate(table.blocks):
        stage, local = 0, None
        if block.layer is not None:
            stage, local = divmod(block.layer, per_stage)
        elif block.kind in ("final_norm", "head"):
            stage = mesh.pp - 1
        sites.append(Site(number, stage, kinds[block.kind], local))
    if shape.tie_embeddings and mesh.pp > 1:
        # The last stage has no embedding to share, so it holds a copy.
        head = FAMILIES[shape.architecture].blocks["head"].megatron[0]
        copy = Held(head.name, head.cut, ("embedding",), head.axis)
        tensors = _tensors(
            shape, mesh, "embedding", table.kinds["embedding"], vocab_divisor, forms, (copy,)
        )
        templates.append(BlockLayout("embedding", tensors))
        sites.append(Site(0, mesh.pp - 1, len(templates) - 1))
    return Layout(
        f"megatron tp={mesh.tp} pp={mesh.pp} dp={mesh.dp} vocab_divisor={vocab_divisor}",
        table,
        tuple(templates),
        tuple(sites),
        tuple(mesh.stage(p) for p in range(mesh.pp)),
    )


def megatron_rank(
    shape: ModelShape, mesh: LearnerMesh, rank: int, vocab_divisor: int = 128
) -> RankLayout:
    """One rank of `megatron_layout`, written out."""
    mesh.coordinates(rank)
    return megatron_layout(shape, mesh, vocab_divisor).rank(rank)


def padded_vocab_size(vocab_size: int, tp: int, vocab_divisor: int = 128) -> int:
    """Rows of Megatron's embedding over all ranks: a multiple of vocab_divisor * tp.

    >>> padded_vocab_size(50257, tp=2)
    50432
    """
    unit = vocab_divisor * tp
    return (vocab_size + unit - 1) // unit * unit


def check_divisible(shape: ModelShape, mesh: LearnerMesh) -> None:
    """Raise LayoutError naming the first size that Megatron cannot split over this mesh."""
    tp, groups = mesh.tp, shape.num_kv_heads
    if shape.num_layers % mesh.pp:
        raise LayoutError(
            f"{shape.num_layers} layers do not split evenly over learner.parallel.pp={mesh.pp}; "
            f"use a pp that divides {shape.num_layers}"
        )
    for name, size in (
        ("attention heads", shape.num_heads),
        ("rows of the gate (intermediate_size)", shape.intermediate_size),
    ):
        if size % tp:
            raise LayoutError(
                f"{size} {name} do not split over learner.parallel.tp={tp}; "
                f"use a tp that divides {size}"
            )
    if groups % tp and tp % groups:
        raise LayoutError(
            f"{groups} kv heads do not split over learner.parallel.tp={tp}; use a tp that divides "
            f"{groups}, or a multiple of it"
        )
    fused_rows = (shape.num_heads + 2 * groups) * shape.head_dim
    if fused_rows % tp:
        raise LayoutError(
            f"{fused_rows} rows of the fused qkv do not split over learner.parallel.tp={tp}; "
            f"use a tp that divides {groups}"
        )


def _tensors(
    shape: ModelShape,
    mesh: LearnerMesh,
    kind: str,
    parameters: tuple[Parameter, ...],
    vocab_divisor: int,
    forms: tuple[str, ...],
    table: tuple[Held, ...] | None = None,
) -> tuple[ShardedTensor, ...]:
    """The local tensors of one kind of block, over the ranks of a stage."""
    known = {parameter.kind: parameter for parameter in parameters}
    heads = Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.attention_output_gate)
    rows = padded_vocab_size(shape.vocab_size, mesh.tp, vocab_divisor) // mesh.tp
    tensors: list[ShardedTensor] = []
    for held in FAMILIES[shape.architecture].blocks[kind].megatron if table is None else table:
        if not set(held.kinds) <= known.keys() or not set(held.forms) <= set(forms):
            continue
        mine = [known[k] for k in held.kinds]
        if held.axis == "experts":
            tensors += cut_experts(held, mine, mesh.expert_holders())
        elif held.cut == "whole":
            everyone = (tuple(range(mesh.stage_size)),)
            tensors.append(cut_tensor(held, mine, everyone, heads))
        else:
            tensors.append(cut_tensor(held, mine, mesh.dense_holders(), heads, rows))
    return tuple(tensors)
