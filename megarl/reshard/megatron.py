"""The layout of Megatron-Core's GPTModel over tensor, pipeline and data parallel ranks.

Owns Megatron's rules: interleaved grouped QKV, gated fc1, vocabulary padding, the even split of
layers over stages, and the second copy of a tied embedding. Names are those of `named_parameters()`
of the rank's GPTModel under the Transformer Engine layer spec. Source: megatron-core 0.19.2,
attention.py, mlp.py, tensor_parallel/layers.py; the tests compare with a real GPTModel.
"""

from __future__ import annotations

from collections.abc import Iterator

from megarl.actor.families import FAMILIES
from megarl.actor.families.family import Kind
from megarl.actor.parameters import layer_shapes, parameter_table
from megarl.actor.shape import ModelShape
from megarl.errors import LayoutError
from megarl.reshard.layout import Layout, LocalTensor, Padding, Piece, RankLayout, overlap
from megarl.reshard.mesh import LearnerMesh


def megatron_layout(shape: ModelShape, mesh: LearnerMesh, vocab_divisor: int = 128) -> Layout:
    """All ranks of the learner; data-parallel replicas hold the same.

    `vocab_divisor` is Megatron's make-vocab-size-divisible-by. Raises LayoutError where a size does
    not divide.
    """
    ranks: dict[int, RankLayout] = {}
    for p in range(mesh.pp):
        for t in range(mesh.tp):
            one = megatron_rank(shape, mesh, mesh.rank(t, p, 0), vocab_divisor)
            for rank in mesh.replicas(t, p):
                ranks[rank] = RankLayout(rank, one.tensors, one.pieces, one.paddings)
    return Layout(
        f"megatron tp={mesh.tp} pp={mesh.pp} dp={mesh.dp} vocab_divisor={vocab_divisor}",
        parameter_table(shape),
        tuple(ranks[rank] for rank in sorted(ranks)),
    )


def megatron_rank(
    shape: ModelShape, mesh: LearnerMesh, rank: int, vocab_divisor: int = 128
) -> RankLayout:
    """One rank of `megatron_layout`, without building the others."""
    check_divisible(shape, mesh)
    return _Rank(shape, mesh, rank, vocab_divisor).layout()


def padded_vocab_size(vocab_size: int, tp: int, vocab_divisor: int = 128) -> int:
    """Rows of Megatron's embedding over all ranks: a multiple of vocab_divisor * tp.

    >>> padded_vocab_size(50257, tp=2)
    50432
    """
    unit = vocab_divisor * tp
    return (vocab_size + unit - 1) // unit * unit


def stage_layers(shape: ModelShape, mesh: LearnerMesh, stage: int) -> range:
    """The global numbers of a pipeline stage's layers."""
    per_stage = shape.num_layers // mesh.pp
    return range(stage * per_stage, (stage + 1) * per_stage)


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


def fused_qkv(shape: ModelShape) -> Iterator[tuple[int, int, int, int]]:
    """(part, first row, end row, row in the fused tensor): per group, queries 0, key 1, value 2."""
    queries, dim = shape.num_heads // shape.num_kv_heads * shape.head_dim, shape.head_dim
    width = queries + 2 * dim
    for group in range(shape.num_kv_heads):
        start = group * width
        yield 0, group * queries, (group + 1) * queries, start
        yield 1, group * dim, (group + 1) * dim, start + queries
        yield 2, group * dim, (group + 1) * dim, start + queries + dim


class _Rank:
    """One rank's layout, being collected."""

    def __init__(self, shape: ModelShape, mesh: LearnerMesh, rank: int, vocab_divisor: int) -> None:
        self.shape, self.mesh, self.rank = shape, mesh, rank
        self.t, self.stage, _ = mesh.coordinates(rank)
        self.names = FAMILIES[shape.architecture].names
        self.padded_vocab = padded_vocab_size(shape.vocab_size, mesh.tp, vocab_divisor)
        self.tensors: list[LocalTensor] = []
        self.pieces: list[Piece] = []
        self.paddings: list[Padding] = []

    def layout(self) -> RankLayout:
        """Everything this rank holds."""
        last = self.stage == self.mesh.pp - 1
        if self.stage == 0:
            self._vocab("embedding", self.names["embedding"].megatron)
        for local, layer in enumerate(stage_layers(self.shape, self.mesh, self.stage)):
            self._layer(local, layer)
        if last:
            size = (self.shape.hidden_size,)
            self._whole("final_norm", self.names["final_norm"].megatron, size, None)
            if not self.shape.tie_embeddings:
                self._vocab("head", self.names["head"].megatron)
            elif self.mesh.pp > 1:  # the last stage has no embedding to share, so it holds a copy
                self._vocab("embedding", self.names["head"].megatron)
        return RankLayout(self.rank, tuple(self.tensors), tuple(self.pieces), tuple(self.paddings))

    def _hf(self, kind: Kind, layer: int | None) -> str:
        return self.names[kind].hf.format(layer=layer)

    def _vocab(self, kind: Kind, local: str) -> None:
        """Rows [t, t + 1) * padded / tp; those at and beyond the vocabulary are padding."""
        rows, hidden = self.padded_vocab // self.mesh.tp, self.shape.hidden_size
        start = self.t * rows
        end = max(start, min(start + rows, self.shape.vocab_size))
        self.tensors.append(LocalTensor(local, (rows, hidden)))
        if end > start:
            box = ((start, end), (0, hidden))
            self.pieces.append(Piece(self._hf(kind, None), box, local, (0, 0)))
        if end - start < rows:
            self.paddings.append(Padding(local, ((end - start, rows), (0, hidden))))

    def _layer(self, local: int, layer: int) -> None:
        sizes = layer_shapes(self.shape)
        tp, hidden, inner = self.mesh.tp, self.shape.hidden_size, self.shape.intermediate_size
        for kind, size in sizes.items():
            name = self.names[kind].megatron.format(layer=local)
            if kind in ("attention_norm", "mlp_norm", "query_norm", "key_norm"):
                self._whole(kind, name, size, layer)
            elif kind == "query":
                self._qkv(name, layer, ("query", "key", "value"), (hidden,))
            elif kind == "query_bias":
                self._qkv(name, layer, ("query_bias", "key_bias", "value_bias"), ())
            elif kind in ("attention_output", "down"):
                self._columns(kind, name, size, layer)
            elif kind == "gate":
                rows = inner // tp
                self.tensors.append(LocalTensor(name, (2 * rows, hidden)))
                box = ((self.t * rows, (self.t + 1) * rows), (0, hidden))
                self.pieces.append(Piece(self._hf("gate", layer), box, name, (0, 0)))
                self.pieces.append(Piece(self._hf("up", layer), box, name, (rows, 0)))

    def _whole(self, kind: Kind, name: str, size: tuple[int, ...], layer: int | None) -> None:
        self.tensors.append(LocalTensor(name, size))
        box = tuple((0, end) for end in size)
        self.pieces.append(Piece(self._hf(kind, layer), box, name, (0,) * len(size)))

    def _columns(self, kind: Kind, name: str, size: tuple[int, ...], layer: int) -> None:
        rows, columns = size[0], size[1] // self.mesh.tp
        self.tensors.append(LocalTensor(name, (rows, columns)))
        box = ((0, rows), (self.t * columns, (self.t + 1) * columns))
        self.pieces.append(Piece(self._hf(kind, layer), box, name, (0, 0)))

    def _qkv(
        self, name: str, layer: int, kinds: tuple[Kind, Kind, Kind], columns: tuple[int, ...]
    ) -> None:
        """Raw rows of the fused tensor: with tp above the number of groups they may cut a head."""
        shape = self.shape
        rows = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim // self.mesh.tp
        first = self.t * rows
        mine = ((first, first + rows),)
        rest = tuple((0, size) for size in columns)
        self.tensors.append(LocalTensor(name, (rows, *columns)))
        for part, start, end, fused in fused_qkv(shape):
            shared = overlap(mine, ((fused, fused + end - start),))
            if shared is None:
                continue
            ((low, high),) = shared
            box = ((start + low - fused, start + high - fused), *rest)
            at = (low - first, *(0 for _ in columns))
            self.pieces.append(Piece(self._hf(kinds[part], layer), box, name, at))
