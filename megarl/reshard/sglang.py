"""The layout of SGLang servers over tensor, expert, data and pipeline parallel ranks.

Owns SGLang's rules: which ranks cut what, fused qkv with copied KV heads, stacked experts,
vocabulary padding, what a server on a CPU pads, which stage holds what. Names are those of
`named_parameters()` before SGLang changes weights for its kernels. Source: sglang 0.5.23,
layers/linear.py, layers/vocab_parallel_embedding.py, layers/moe/fused_moe_triton/layer.py,
configs/update_config.py and its models; the tests compare with SGLang's own loaders.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from megarl.actor.families import FAMILIES
from megarl.actor.families.family import Axis, Held, Kind
from megarl.actor.parameters import BlockTable, Parameter, block_table
from megarl.actor.shape import ModelShape
from megarl.errors import LayoutError
from megarl.reshard.blocks import ScaleBlock
from megarl.reshard.layout import (
    BlockLayout,
    Layout,
    Piece,
    RankLayout,
    Shard,
    ShardedTensor,
    Site,
)
from megarl.reshard.mesh import ServerMesh
from megarl.reshard.rules import Heads, columns, cut_experts, cut_tensor, rows
from megarl.reshard.scales import engine_scales
from megarl.reshard.sglang_limits import check_served, cpu_stretch

VOCAB_PADDING = 64  # DEFAULT_VOCAB_PADDING_SIZE, sglang vocab_parallel_embedding.py

NUM_DRAFT_LAYERS = 1  # "Only 1 nextn layer is supported", deepseek_weight_loader.py, glm4_moe.py


def sglang_layout(
    shape: ModelShape, mesh: ServerMesh, fp8_block: ScaleBlock | None = None
) -> Layout:
    """All ranks of all servers; with `fp8_block` quantized tensors are float8 with scales.

    Layers of multi-token prediction are not in it: they are the draft model's. Raises LayoutError
    where SGLang cannot hold the model so.
    """
    check_served(shape, mesh, fp8_block)
    table = block_table(replace(shape, num_mtp_layers=0), fp8_block)
    server = _Server(shape, mesh, fp8_block)
    kinds = {kind: i for i, kind in enumerate(table.kinds)}
    templates = [
        BlockLayout(kind, server.tensors(kind, parameters))
        for kind, parameters in table.kinds.items()
    ]
    ends = _end_stages(shape, mesh)
    bounds = [mesh.layers(shape.num_layers, p) for p in range(mesh.pp)]
    sites = []
    for number, block in enumerate(table.blocks):
        if block.layer is None:
            stages: Iterable[int] = ends[block.kind]
        else:
            stages = [p for p, (first, end) in enumerate(bounds) if first <= block.layer < end]
        sites += [Site(number, p, kinds[block.kind], block.layer) for p in stages]
    if shape.tie_embeddings and mesh.pp > 1:
        # The last stage has no embedding to share, so it holds a copy under the head's name.
        head = FAMILIES[shape.architecture].blocks["head"].sglang[0]
        copy = replace(head, kinds=("embedding",))
        templates.append(
            BlockLayout("embedding", server.tensors("head", table.kinds["embedding"], (copy,)))
        )
        sites.append(Site(0, mesh.pp - 1, len(templates) - 1))
    return _layout(_words("sglang", mesh, fp8_block), table, templates, sites, mesh)


def sglang_draft_layout(
    shape: ModelShape, mesh: ServerMesh, fp8_block: ScaleBlock | None = None
) -> Layout:
    """The draft model that decodes ahead of the server: the layer of multi-token prediction.

    It runs on the last pipeline stage. Embedding and head are the served model's own, so they are
    not in it. Raises LayoutError where the policy has no such layer, or more than SGLang serves.
    """
    check_served(shape, mesh, fp8_block)
    if shape.num_mtp_layers != NUM_DRAFT_LAYERS:
        raise LayoutError(
            f"the policy has {shape.num_mtp_layers} layers of multi-token prediction; SGLang's "
            f"draft model of {shape.architecture} is made of {NUM_DRAFT_LAYERS}"
        )
    everything = block_table(shape, fp8_block)
    table = BlockTable(
        tuple(block for block in everything.blocks if block.kind == "mtp"),
        {"mtp": everything.kinds["mtp"]},
    )
    tensors = _Server(shape, mesh, fp8_block).tensors("mtp", table.kinds["mtp"])
    site = Site(0, mesh.pp - 1, 0, table.blocks[0].layer)
    words = _words("sglang draft", mesh, fp8_block)
    return _layout(words, table, [BlockLayout("mtp", tensors)], [site], mesh)


def sglang_rank(shape: ModelShape, mesh: ServerMesh, rank: int) -> RankLayout:
    """One rank of `sglang_layout`."""
    if not 0 <= rank < mesh.servers * mesh.size:
        raise LayoutError(
            f"server rank {rank} is not among the {mesh.servers * mesh.size} ranks of {mesh}"
        )
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


def _end_stages(shape: ModelShape, mesh: ServerMesh) -> dict[str, Sequence[int]]:
    """The stages that hold the blocks beside the decoder layers."""
    first, last = 0, mesh.pp - 1
    served = FAMILIES[shape.architecture].served
    embeds_late = mesh.draft and served.embeds_for_draft
    return {
        "embedding": sorted({first, last}) if embeds_late else (first,),
        "final_norm": (last,),
        "head": range(mesh.pp) if served.head_everywhere else (last,),
    }


def _words(model: str, mesh: ServerMesh, fp8_block: ScaleBlock | None) -> str:
    """A layout's kind: the server, and the blocks of its quantized tensors."""
    return f"{model} {mesh}" + ("" if fp8_block is None else f" fp8={fp8_block[0]}x{fp8_block[1]}")


def _layout(
    kind: str,
    table: BlockTable,
    templates: Sequence[BlockLayout],
    sites: Sequence[Site],
    mesh: ServerMesh,
) -> Layout:
    stages = tuple(mesh.stage(p) for p in range(mesh.pp))
    return Layout(kind, table, tuple(templates), tuple(sites), stages)


@dataclass(frozen=True, slots=True)
class _Server:
    """How the ranks of one stage of all servers cut the blocks of one policy."""

    shape: ModelShape
    mesh: ServerMesh
    fp8_block: ScaleBlock | None

    def tensors(
        self, kind: str, parameters: Sequence[Parameter], table: tuple[Held, ...] | None = None
    ) -> tuple[ShardedTensor, ...]:
        """The local tensors of one kind of block."""
        known = {parameter.kind: parameter for parameter in parameters}
        by_name = {parameter.name: parameter for parameter in parameters}
        made: list[ShardedTensor] = []
        for held in table or FAMILIES[self.shape.architecture].blocks[kind].sglang:
            if not set(held.kinds) <= known.keys() or self._in_experts(held):
                continue
            mine = [known[k] for k in held.kinds]
            tensors = (
                self._experts(held, mine, known)
                if held.axis == "experts"
                else (self._cut(held, mine, kind),)
            )
            for tensor in tensors:
                made.append(tensor)
                if self.fp8_block is not None and all(p.quantized for p in mine):
                    made.append(engine_scales(tensor, by_name, self.fp8_block))
        return tuple(made)

    def _in_experts(self, held: Held) -> bool:
        return self.mesh.fused_shared_experts and held.axis == "shared_experts"

    def _stretch(self, axis: Axis) -> Fraction:
        return cpu_stretch(self.shape, self.mesh, axis, self.fp8_block)

    def _cut(self, held: Held, parameters: Sequence[Parameter], block: str) -> ShardedTensor:
        shape, mesh = self.shape, self.mesh
        count = 1 if held.cut == "whole" else self._count(held.axis, block)
        heads = Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim)
        rows_each = padded_vocab_size(shape.vocab_size, count) // count
        stretch = self._stretch(held.axis) if held.cut != "whole" else Fraction(1)
        return cut_tensor(held, parameters, mesh.holders(count), heads, rows_each, stretch)

    def _count(self, axis: Axis, block: str) -> int:
        """Over how many neighbouring ranks a tensor is cut; others hold copies."""
        mesh = self.mesh
        if axis == "attention" or (axis == "vocabulary" and self._within_attention(block)):
            return mesh.attention_tp
        whole = {"mlp": mesh.dense_whole, "shared_experts": mesh.shared_whole}
        return 1 if whole.get(axis) else mesh.tp

    def _within_attention(self, block: str) -> bool:
        """Whether the vocabulary is cut over the ranks of one copy of the attention."""
        tied = self.shape.tie_embeddings and self.mesh.pp == 1
        return self.mesh.dp_head if block == "head" and not tied else True

    def _experts(
        self, held: Held, parameters: Sequence[Parameter], known: dict[Kind, Parameter]
    ) -> tuple[ShardedTensor, ...]:
        """The stack of this rank's experts, with the shared ones behind where they are fused."""
        if self.mesh.up_first and held.cut == "rows":
            parameters = parameters[::-1]
        made = cut_experts(held, parameters, self.mesh.expert_holders(), self._stretch(held.axis))
        if not self.mesh.fused_shared_experts:
            return made
        names = [p.kind.replace("expert", "shared", 1) for p in parameters]
        return tuple(self._with_shared(t, held, [known[n] for n in names]) for t in made)

    def _with_shared(
        self, tensor: ShardedTensor, held: Held, shared: Sequence[Parameter]
    ) -> ShardedTensor:
        """`tensor` with one more slot, which holds the shared expert."""
        slot, count = tensor.shape[0], self.mesh.expert_tp
        shards = []
        for shard in tensor.shards:
            index = shard.holders[0] % count
            if held.cut == "rows":
                _, pieces, _ = rows(tensor.name, shared, index, count)
            else:
                _, pieces, _ = columns(tensor.name, shared[0], index, count)
            more = tuple(Piece(p.tensor, p.box, p.local, (slot, *p.at)) for p in pieces)
            shards.append(Shard(shard.holders, shard.pieces + more, shard.paddings))
        return ShardedTensor(tensor.name, (slot + 1, *tensor.shape[1:]), tuple(shards))
