"""A layout in words: one line for each local tensor, the same for learner, servers and files.

    decoder.layers.{layer}.mlp.linear_fc2.weight [8, 4]  2 shards x 2 replicas:
        0: down_proj[:, 0:4]->0   1: down_proj[:, 4:8]->0

reads: shard 0 holds columns 0 to 4 of down_proj, from its own row and column 0 on. Dims that are
whole are `:`, trailing ones are left out. Owns the notation. Knows nothing of plans or settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from megarl.actor.parameters import SCALE_SUFFIX, STACKED
from megarl.reshard.layout import BlockLayout, Box, Layout, Piece, Shard, ShardedTensor

SHOWN = 4  # shards of a tensor, or pieces of a shard, above which the middle is left out

_SERIAL = re.compile(r"\d+(?!.*\d)")  # the last number in a name
_LAYER = re.compile(r"^(model\.)?(layers\.(\{layer\}|\d+)\.)?")


def describe(layout: Layout) -> str:
    """The layout's stages and the local tensors of its templates.

    >>> from megarl.actor.parameters import Parameter
    >>> from megarl.reshard.explicit import full_layout, one_block
    >>> table = one_block((Parameter("up_proj.weight", (2, 3), "up"),))
    >>> print(describe(full_layout(table)))
    whole tensors: 1 rank
      rank 0: all
      all
        up_proj.weight [2, 3] 1 shard: up_proj->0
    """
    lines = [f"{layout.kind}: {counted(len(layout.rank_ids), 'rank')}"]
    lines += [f"  {line}" for line in elided(stage_lines(layout))]
    for head, tensors in tensor_lines(layout):
        lines.append(f"  {head}")
        lines += [f"    {line}" for line in tensors]
    return "\n".join(lines)


def stage_lines(layout: Layout) -> list[str]:
    """For each group of ranks that hold the same blocks, the ranks and the blocks."""
    held: dict[int, dict[tuple[str, str], list[int | None]]] = {}
    for site in layout.sites:
        block = layout.table.blocks[site.block]
        kinds = held.setdefault(site.stage, {})
        kinds.setdefault((site.prefix, block.kind), []).append(block.layer)
    lines = []
    for stage, kinds in sorted(held.items()):
        ranks = layout.stages[stage]
        if ranks:
            parts = []
            for (prefix, kind), layers in kinds.items():
                numbers = [layer for layer in layers if layer is not None]
                parts.append(prefix + kind + (f" {ranks_text(numbers)}" if numbers else ""))
            word = "rank" if len(ranks) == 1 else "ranks"
            lines.append(f"{word} {ranks_text(ranks)}: {', '.join(parts)}")
    return lines


def tensor_lines(layout: Layout) -> Iterator[tuple[str, list[str]]]:
    """(the kinds of block, the local tensors that exactly these kinds have)."""
    shapes = {p.name: p.shape for kind in layout.table.kinds.values() for p in kind}
    used = {site.template for site in layout.sites}
    kinds: dict[str, list[str]] = {}
    for number in sorted(used):
        template = layout.templates[number]
        for line in _template_lines(template, shapes):
            kinds.setdefault(line, []).append(template.kind)
    groups: dict[tuple[str, ...], list[str]] = {}
    for line, found in kinds.items():
        groups.setdefault(tuple(dict.fromkeys(found)), []).append(line)
    for found_kinds, lines in groups.items():
        yield ", ".join(found_kinds), lines


def _template_lines(template: BlockLayout, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """A line for each tensor; of those that differ in a number only, the first; scales beside."""
    series: dict[tuple[object, ...], list[ShardedTensor]] = {}
    scales = {tensor.name: tensor.shape for tensor in template.tensors}
    for tensor in template.tensors:
        if tensor.name.endswith(SCALE_SUFFIX) and tensor.name.removesuffix(SCALE_SUFFIX) in scales:
            continue
        parts = tuple(piece.tensor for piece in tensor.shards[0].pieces)
        key = (_SERIAL.sub("", tensor.name), tensor.shape, len(tensor.shards), parts)
        series.setdefault(key, []).append(tensor)
    for tensors in series.values():
        line = tensor_text(tensors[0], shapes)
        if len(tensors) > 1:
            line += f"  (and {len(tensors) - 1} more, to {tensors[-1].name})"
        beside = scales.get(tensors[0].name + SCALE_SUFFIX)
        if beside is not None:
            line += f"  (float8, scales {list(beside)})"
        yield line


def tensor_text(tensor: ShardedTensor, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """One local tensor over the ranks of a stage. `shapes` are those of the parameters.

    >>> pieces = (Piece("up_proj.weight", ((0, 2), (0, 8)), "fc1", (0, 0)),)
    >>> other = (Piece("up_proj.weight", ((2, 4), (0, 8)), "fc1", (0, 0)),)
    >>> tensor = ShardedTensor("fc1", (2, 8), (Shard((0, 2), pieces), Shard((1, 3), other)))
    >>> tensor_text(tensor, {"up_proj.weight": (4, 8)})
    'fc1 [2, 8] 2 shards x 2 replicas: 0: up_proj[0:2]->0  1: up_proj[2:4]->0'
    """
    counts = sorted({len(shard.holders) for shard in tensor.shards})
    copies = ""
    if counts and counts[-1] > 1:
        copies = f" x {'-'.join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))} replicas"
    shards = [_shard_text(shard, shapes) for shard in tensor.shards]
    if len(shards) > 1:
        shards = [f"{i}: {text}" for i, text in enumerate(shards)]
    return (
        f"{tensor.name} {list(tensor.shape)} {counted(len(tensor.shards), 'shard')}{copies}: "
        + "  ".join(elided(shards, 3))
    )


def _shard_text(shard: Shard, shapes: Mapping[str, tuple[int, ...]]) -> str:
    parts = [piece_text(piece, shapes[piece.tensor]) for piece in shard.pieces]
    parts = elided(parts)
    parts += [f"0->{box_text(p.box, ())}" for p in shard.paddings]
    return " ".join(parts)


def piece_text(piece: Piece, shape: tuple[int, ...]) -> str:
    """A piece as `parameter[box]->offset`.

    >>> piece_text(Piece("mlp.down_proj.weight", ((0, 4), (2, 4)), "fc2", (0, 0)), (4, 8))
    'down_proj[:, 2:4]->0'
    """
    return f"{short(piece.tensor)}{box_text(piece.box, shape)}->{offset_text(piece.at)}"


def box_text(box: Box, shape: tuple[int, ...]) -> str:
    """A box of a tensor of that shape, as numpy writes it; a whole tensor is "".

    Without a shape nothing is known to be whole.

    >>> box_text(((3, 4), (0, 8), (2, 4)), (16, 8, 4)), box_text(((0, 4), (0, 8)), (8, 8))
    ('[3, :, 2:4]', '[0:4]')
    """
    parts = []
    for dim, (start, end) in enumerate(box):
        if dim < len(shape) and (start, end) == (0, shape[dim]):
            parts.append(":")
        else:
            parts.append(str(start) if end == start + 1 else f"{start}:{end}")
    while parts and parts[-1] == ":":
        parts.pop()
    return f"[{', '.join(parts)}]" if parts else ""


def offset_text(at: Sequence[int]) -> str:
    """Where a piece begins in its local tensor; trailing zeros are left out.

    >>> offset_text((512, 0)), offset_text((0, 0)), offset_text((3, 128, 0)), offset_text((0, 7))
    ('512', '0', '3,128', '0,7')
    """
    last = max((i for i, offset in enumerate(at) if offset), default=0)
    return ",".join(str(offset) for offset in at[: last + 1]) or "0"


def short(name: str) -> str:
    """The part of a parameter's name that tells it from the others of its block.

    >>> short("model.layers.{layer}.self_attn.q_proj.weight"), short("model.norm.weight")
    ('q_proj', 'norm')
    >>> short("model.layers.3.mlp.experts.*.up_proj.weight_scale_inv")
    'experts.*.up_proj.weight_scale_inv'
    >>> short("model.layers.3.mlp.shared_experts.up_proj.weight")
    'shared_experts.up_proj'
    """
    parts = _LAYER.sub("", name).split(".")
    if parts[-1] == "weight":
        parts.pop()
    keep = 2 if parts[-1] in ("bias", f"weight{SCALE_SUFFIX}", "e_score_correction_bias") else 1
    if STACKED in parts:
        keep = len(parts) - parts.index(STACKED) + 1
    elif "shared_experts" in parts:
        keep = len(parts) - parts.index("shared_experts")
    return ".".join(parts[-keep:])


def ranks_text(ranks: Sequence[int]) -> str:
    """Numbers, in order, with runs of equal steps written as such.

    >>> ranks_text((0, 1, 2, 3)), ranks_text((1, 9, 17, 25)), ranks_text((0, 1, 2, 8, 9, 10))
    ('0..3', '1..25 by 8', '0..2, 8..10')
    >>> ranks_text((0, 1)), ranks_text((5,)), ranks_text((0, 4, 8, 9, 11))
    ('0, 1', '5', '0..8 by 4, 9, 11')
    """
    parts: list[str] = []
    at = 0
    while at < len(ranks):
        end = at + 1
        if end < len(ranks):
            step = ranks[end] - ranks[at]
            while end + 1 < len(ranks) and ranks[end + 1] - ranks[end] == step:
                end += 1
            if end - at >= 2 and step > 0:
                parts.append(f"{ranks[at]}..{ranks[end]}" + (f" by {step}" if step > 1 else ""))
                at = end + 1
                continue
        parts.append(str(ranks[at]))
        at += 1
    return ", ".join(elided(parts, 6))


def elided(parts: Sequence[str], shown: int = SHOWN) -> list[str]:
    """The parts, without the middle where there are more than `shown`.

    >>> elided(["a", "b", "c", "d", "e"], 3)
    ['a', 'b', '...', 'e']
    """
    if len(parts) <= shown:
        return list(parts)
    return [*parts[: shown - 1], "...", parts[-1]]


def counted(number: int, word: str) -> str:
    """A number of things.

    >>> counted(1, "rank"), counted(8, "rank")
    ('1 rank', '8 ranks')
    """
    return f"{number} {word}" + ("" if number == 1 else "s")
