"""Which local tensors of an engine are no parameters in the policy's precision.

Owns two questions that whoever writes into an engine has to ask of a rank of a layout: what it
finds in `named_buffers()` instead of `named_parameters()`, and what it casts on arrival. The
answers are data of the families (`Held.buffer`, `Held.float32`). Copies nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from megarl.actor.families import FAMILIES
from megarl.actor.shape import ModelShape
from megarl.reshard.layout import Layout


def learner_buffers(shape: ModelShape, layout: Layout, rank: int) -> frozenset[str]:
    """Names on `rank` of a Megatron layout of `shape` that are buffers: the router's expert bias.

    Megatron keeps them in float32 (megatron-core 0.19.2, transformer/moe/router.py).
    """
    marked = {
        kind: {held.name for held in part.megatron if held.buffer}
        for kind, part in FAMILIES[shape.architecture].blocks.items()
    }
    return _on(layout, rank, marked)


def float32_on_server(shape: ModelShape, layout: Layout, rank: int) -> frozenset[str]:
    """Names on `rank` of an SGLang layout of `shape` that the server keeps in float32, whatever the
    policy's precision is.

    They are the tensors of float32 parameters (router biases, scales of float8 blocks) and those
    that SGLang alone keeps so, whose values are cast on arrival: GLM-4.5's router.
    """
    marked = {
        kind: {held.name for held in part.sglang if held.float32}
        for kind, part in FAMILIES[shape.architecture].blocks.items()
    }
    parameters = [p for kind in layout.table.kinds.values() for p in kind]
    precise = {p.name for p in parameters if p.precision == "float32"}
    for template in layout.templates:
        marked.setdefault(template.kind, set()).update(
            tensor.name
            for tensor in template.tensors
            if any(piece.tensor in precise for shard in tensor.shards for piece in shard.pieces)
        )
    return _on(layout, rank, marked)


def _on(layout: Layout, rank: int, marked: Mapping[str, Collection[str]]) -> frozenset[str]:
    """The names on a rank of tensors that are marked by kind of block and name there."""
    found = set()
    for site in layout.sites:
        stage, template = layout.stages[site.stage], layout.templates[site.template]
        for tensor in template.tensors:
            if tensor.name not in marked.get(template.kind, ()):
                continue
            holders = {stage[i] for shard in tensor.shards for i in shard.holders}
            if rank in holders:
                found.add(site.name(tensor.name))
    return frozenset(found)
