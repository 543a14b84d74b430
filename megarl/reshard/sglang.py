"""The layout of SGLang servers over tensor, expert, data and pipeline parallel ranks.

Owns SGLang's rules: fused qkv with copied KV heads, gate_up, vocabulary padding. Names are those of
`named_parameters()`. Source: sglang 0.5.23, layers/linear.py, layers/vocab_parallel_embedding.py
and configs/update_config.py; the tests compare with SGLang's own loaders.
"""

from __future__ import annotations

from megarl.actor.families import FAMILIES
from megarl.actor.parameters import Parameter, block_table
from megarl.actor.shape import ModelShape
from megarl.errors import LayoutError
from megarl.reshard.layout import BlockLayout, Layout, RankLayout, ShardedTensor, Site
from megarl.reshard.mesh import ServerMesh
from megarl.reshard.rules import Heads, cut_tensor

VOCAB_PADDING = 64  # DEFAULT_VOCAB_PADDING_SIZE, sglang vocab_parallel_embedding.py
CPU_PADDING = 32  # DEFAULT_MOE_PADDING_SIZE, sglang configs/update_config.py


def sglang_layout(
    shape: ModelShape, mesh: ServerMesh, fp8_block: tuple[int, int] | None = None
) -> Layout:
    """All ranks of all servers. Raises LayoutError where a size does not divide."""
    check_divisible(shape, mesh)
    table = block_table(shape, fp8_block)
    kinds = {kind: i for i, kind in enumerate(table.kinds)}
    templates = tuple(
        BlockLayout(kind, _tensors(shape, mesh, kind, parameters))
        for kind, parameters in table.kinds.items()
    )
    sites = tuple(
        Site(number, 0, kinds[block.kind], block.layer) for number, block in enumerate(table.blocks)
    )
    ranks = tuple(range(mesh.servers * mesh.size))
    return Layout(f"sglang tp={mesh.tp}", table, templates, sites, (ranks,))


def sglang_rank(shape: ModelShape, mesh: ServerMesh, rank: int) -> RankLayout:
    """One rank of `sglang_layout`."""
    if not 0 <= rank < mesh.size:
        raise LayoutError(f"server rank {rank} is not in a server of {mesh.size} ranks")
    return sglang_layout(shape, mesh).rank(rank)


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Rows of SGLang's embedding over all ranks.

    >>> padded_vocab_size(151936, tp=4), padded_vocab_size(100, tp=3)
    (151936, 192)
    """
    unit = VOCAB_PADDING
    if _round_up(vocab_size, unit) % tp:
        unit *= tp
    return _round_up(vocab_size, unit)


def _round_up(size: int, unit: int) -> int:
    return (size + unit - 1) // unit * unit


def check_divisible(shape: ModelShape, mesh: ServerMesh) -> None:
    """Raise LayoutError naming the first size that this server cannot hold as it is."""
    heads, kv_heads, inner, tp = (
        shape.num_heads,
        shape.num_kv_heads,
        shape.intermediate_size,
        mesh.tp,
    )
    good = [t for t in range(1, heads + 1) if _splits(shape, ServerMesh(t, mesh.cpu))]
    if tp in good:
        return
    use = f"use rollout.parallel.tp from {', '.join(map(str, good))}" if good else "no tp works"
    where = f"rollout.parallel.tp={tp}"
    if mesh.cpu and inner % (CPU_PADDING * tp):
        raise LayoutError(
            f"intermediate_size {inner} is not a multiple of {CPU_PADDING} * {where}, so SGLang on "
            f"a CPU would pad it; {use}"
        )
    if mesh.cpu and kv_heads % tp:
        raise LayoutError(
            f"{kv_heads} kv heads do not split over {where}, so SGLang on a CPU would pad them "
            f"with zeros instead of copying them; {use}"
        )
    for name, size in (("attention heads", heads), ("columns of down_proj", inner)):
        if size % tp:
            raise LayoutError(f"{size} {name} do not split over {where}; {use}")
    raise LayoutError(f"{kv_heads} kv heads neither split over nor divide {where}; {use}")


def _splits(shape: ModelShape, mesh: ServerMesh) -> bool:
    kv, tp = shape.num_kv_heads, mesh.tp
    heads_split = shape.num_heads % tp == 0 and (kv % tp == 0 or tp % kv == 0)
    if not mesh.cpu:
        return heads_split and shape.intermediate_size % tp == 0
    return heads_split and kv % tp == 0 and shape.intermediate_size % (CPU_PADDING * tp) == 0


def _tensors(
    shape: ModelShape, mesh: ServerMesh, kind: str, parameters: tuple[Parameter, ...]
) -> tuple[ShardedTensor, ...]:
    """The local tensors of one kind of block, over the ranks of a stage of all servers."""
    known = {parameter.kind: parameter for parameter in parameters}
    heads = Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.attention_output_gate)
    rows = padded_vocab_size(shape.vocab_size, mesh.tp) // mesh.tp
    everyone = (tuple(range(mesh.servers * mesh.tp)),)
    over_tp = tuple(tuple(range(r, mesh.servers * mesh.tp, mesh.tp)) for r in range(mesh.tp))
    tensors: list[ShardedTensor] = []
    for held in FAMILIES[shape.architecture].blocks[kind].sglang:
        if set(held.kinds) <= known.keys():
            holders = everyone if held.cut == "whole" else over_tp
            mine = [known[k] for k in held.kinds]
            tensors.append(cut_tensor(held, mine, holders, heads, rows))
    return tuple(tensors)
