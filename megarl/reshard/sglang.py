"""The layout of an SGLang server's model over tensor parallel ranks.

Owns SGLang's rules: fused qkv with copied KV heads, gate_up, vocabulary padding. Names are those of
`named_parameters()`. Source: sglang 0.5.23, layers/linear.py, layers/vocab_parallel_embedding.py
and configs/update_config.py; the tests compare with SGLang's own loaders.
"""

from __future__ import annotations

from megarl.actor.families import FAMILIES
from megarl.actor.families.family import Kind
from megarl.actor.parameters import layer_shapes, parameter_table
from megarl.actor.shape import ModelShape
from megarl.errors import LayoutError
from megarl.reshard.layout import Box, Layout, LocalTensor, Padding, Piece, RankLayout
from megarl.reshard.mesh import ServerMesh

VOCAB_PADDING = 64  # DEFAULT_VOCAB_PADDING_SIZE, sglang vocab_parallel_embedding.py
CPU_PADDING = 32  # DEFAULT_MOE_PADDING_SIZE, sglang configs/update_config.py


def sglang_layout(shape: ModelShape, mesh: ServerMesh) -> Layout:
    """All ranks of one server. Raises LayoutError where a size does not divide."""
    return Layout(
        f"sglang tp={mesh.tp}",
        parameter_table(shape),
        tuple(sglang_rank(shape, mesh, rank) for rank in range(mesh.tp)),
    )


def sglang_rank(shape: ModelShape, mesh: ServerMesh, rank: int) -> RankLayout:
    """One rank of `sglang_layout`, without building the others."""
    check_divisible(shape, mesh)
    if not 0 <= rank < mesh.tp:
        raise LayoutError(f"server rank {rank} is not in a server of {mesh.tp} ranks")
    return _Rank(shape, mesh.tp, rank).layout()


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


class _Rank:
    """One rank's layout, being collected."""

    def __init__(self, shape: ModelShape, tp: int, rank: int) -> None:
        self.shape, self.tp, self.rank = shape, tp, rank
        self.names = FAMILIES[shape.architecture].names
        self.tensors: list[LocalTensor] = []
        self.pieces: list[Piece] = []
        self.paddings: list[Padding] = []

    def layout(self) -> RankLayout:
        """Everything this rank holds. A tied head is the embedding itself and not listed again."""
        self._vocab("embedding")
        for layer in range(self.shape.num_layers):
            self._layer(layer)
        self._boxes(
            self.names["final_norm"].sglang,
            (self.shape.hidden_size,),
            [("final_norm", None, ((0, self.shape.hidden_size),), (0,))],
        )
        if not self.shape.tie_embeddings:
            self._vocab("head")
        return RankLayout(self.rank, tuple(self.tensors), tuple(self.pieces), tuple(self.paddings))

    def _boxes(
        self,
        name: str,
        size: tuple[int, ...],
        boxes: list[tuple[Kind, int | None, Box, tuple[int, ...]]],
    ) -> None:
        self.tensors.append(LocalTensor(name, size))
        for kind, layer, box, at in boxes:
            hf = self.names[kind].hf.format(layer=layer)
            self.pieces.append(Piece(hf, box, name, at))

    def _vocab(self, kind: Kind) -> None:
        """Rows [r, r + 1) * padded / tp; those at and beyond the vocabulary are padding."""
        vocab, hidden = self.shape.vocab_size, self.shape.hidden_size
        rows = padded_vocab_size(vocab, self.tp) // self.tp
        start = min(self.rank * rows, vocab)
        end = min(start + rows, vocab)
        name = self.names[kind].sglang
        box = ((start, end), (0, hidden))
        self._boxes(name, (rows, hidden), [(kind, None, box, (0, 0))] if end > start else [])
        if end - start < rows:
            self.paddings.append(Padding(name, ((end - start, rows), (0, hidden))))

    def _layer(self, layer: int) -> None:
        shape, r = self.shape, self.rank
        inner = shape.intermediate_size // self.tp
        for kind, size in layer_shapes(shape).items():
            name = self.names[kind].sglang.format(layer=layer)
            rest = tuple((0, end) for end in size[1:])
            zeros = (0,) * len(rest)
            if kind in ("attention_norm", "mlp_norm", "query_norm", "key_norm"):
                self._boxes(name, size, [(kind, layer, ((0, size[0]),), (0,))])
            elif kind == "query":
                self._qkv(name, layer, ("query", "key", "value"), size[1:])
            elif kind == "query_bias":
                self._qkv(name, layer, ("query_bias", "key_bias", "value_bias"), ())
            elif kind in ("attention_output", "down"):
                columns = size[1] // self.tp
                box = ((0, size[0]), (r * columns, (r + 1) * columns))
                self._boxes(name, (size[0], columns), [(kind, layer, box, (0, 0))])
            elif kind == "gate":
                rows: Box = ((r * inner, (r + 1) * inner), *rest)
                both: list[tuple[Kind, int]] = [("gate", 0), ("up", inner)]
                boxes = [(k, layer, rows, (row, *zeros)) for k, row in both]
                self._boxes(name, (2 * inner, *size[1:]), list(boxes))

    def _qkv(
        self, name: str, layer: int, kinds: tuple[Kind, Kind, Kind], columns: tuple[int, ...]
    ) -> None:
        """This rank's query heads, then its key heads, then its value heads.

        With more ranks than KV heads, tp / kv_heads ranks in a row hold copies of one.
        """
        dim, kv_heads = self.shape.head_dim, self.shape.num_kv_heads
        queries = self.shape.num_heads // self.tp * dim
        keys = max(1, kv_heads // self.tp) * dim
        slot = self.rank // max(1, self.tp // kv_heads)
        rest, zeros = tuple((0, size) for size in columns), (0,) * len(columns)
        rows = (
            (self.rank * queries, (self.rank + 1) * queries),
            (slot * keys, (slot + 1) * keys),
            (slot * keys, (slot + 1) * keys),
        )
        at = (0, queries, queries + keys)
        self._boxes(
            name,
            (queries + 2 * keys, *columns),
            [
                (kind, layer, (span, *rest), (row, *zeros))
                for kind, span, row in zip(kinds, rows, at, strict=True)
            ],
        )
