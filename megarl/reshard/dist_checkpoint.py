"""A Megatron distributed checkpoint (torch_dist) as a layout: each file is a rank.

Owns the way from its global tensors, cut into chunks, to Hugging Face's. A global tensor is what
one tensor-parallel rank holds: fused rows in Megatron's order, vocabulary padding included. Layers
that are alike share one tensor with a leading dim of layers; others have their number in the name.
The experts of a layer share one tensor with a leading dim of experts, whatever form they have in
memory. Knows nothing of torch: chunks come as plain values.

It is for the conversion of checkpoints (`convert/`): planned to the layout of other files, one is
converted by the same executor that loads weights.

Source: checkpoints saved by megatron-core 0.19.2 (transformer/transformer_block.py, mlp.py,
moe/experts.py, multi_token_prediction.py). Layers for multi-token prediction, and experts saved as
tensors of their own, are by these files' rules; the tests read real checkpoints of the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megarl.actor.shape import ModelShape
from megarl.errors import LayoutError
from megarl.reshard.explicit import explicit_layout
from megarl.reshard.layout import (
    Box,
    Layout,
    LocalTensor,
    Padding,
    Piece,
    RankLayout,
    cut,
    local_box,
    num_elements,
    overlap,
    whole,
    within,
)
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh

EMBEDDING = "embedding.word_embeddings.weight"

# What a checkpoint holds besides the model's tensors.
IGNORED_PREFIXES = ("optimizer.", "chained_", "rng")

_LAYERS = re.compile(r"decoder\.layers\.(?!\d)")
_NUMBERED = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.experts\.(?:(\d+)\.)?")
_LINEAR = re.compile(r"(.*\.(?:linear_\w+|eh_proj))\.weight$")
_HALF = re.compile(r"(\.linear_fc1\.weight)_([wv])$")


@dataclass(frozen=True, slots=True)
class Chunk:
    """One stored part of the global tensor `key`: its box, the tensor's shape, and its file.

    `offsets` and `sizes` are of the stored tensor's dims, the leading dim of layers included.
    """

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk lies: a box of the tensor `name` that a model on one rank would hold.

    `whole` is that tensor's shape as the checkpoint has it, without the dim of experts where they
    are apart. `shape` is the chunk's own in the layout; `local` is its name there, unique in the
    checkpoint.
    """

    name: str
    whole: tuple[int, ...]
    box: Box
    shape: tuple[int, ...]
    local: str


def policy_chunks(chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
    """Those of the model itself: without the optimizer's, which may have files of their own."""
    return tuple(chunk for chunk in chunks if not chunk.key.startswith(IGNORED_PREFIXES))


def without_absent_mtp(shape: ModelShape, chunks: Iterable[Chunk]) -> ModelShape:
    """The model that was saved: layers for multi-token prediction need not be trained with it."""
    has_mtp = any(chunk.key.startswith("mtp.") for chunk in chunks)
    return shape if has_mtp else replace(shape, num_mtp_layers=0)


def chunk_files(chunks: Iterable[Chunk]) -> tuple[str, ...]:
    """The files that chunks are in, sorted by name: the ranks of their layout, in order."""
    return tuple(sorted({chunk.file for chunk in chunks}))


def place(chunk: Chunk) -> Place:
    """Where a chunk lies in the model.

    >>> place(Chunk("decoder.layers.mlp.linear_fc2.weight", (4, 8, 6), (3, 0, 2), (1, 8, 2), "f"))
    ... # doctest: +NORMALIZE_WHITESPACE
    Place(name='decoder.layers.3.mlp.linear_fc2.weight', whole=(8, 6), box=((0, 8), (2, 4)),
          shape=(8, 2), local='decoder.layers.3.mlp.linear_fc2.weight@0,2')

    Raises LayoutError where it holds parts of several layers.
    """
    key, offsets, sizes = chunk.key, chunk.offsets, chunk.sizes
    shape = chunk.shape
    if _LAYERS.match(key):
        if sizes[0] != 1:
            raise LayoutError(
                f"{chunk.file}: a chunk of {key} holds {sizes[0]} layers from {offsets[0]} on; "
                "megarl reads chunks of one layer each, as Megatron writes them"
            )
        key = _LAYERS.sub(f"decoder.layers.{offsets[0]}.", key)
        offsets, sizes, shape = offsets[1:], sizes[1:], shape[1:]
    local = f"{key}@{','.join(map(str, offsets))}"
    box = tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True))
    half = _HALF.search(key)
    if half:  # gate and up as tensors of their own: in the fused tensor, up is below gate
        key = key[: half.end(1)]
        first = shape[-2] if half[2] == "v" else 0
        shape = (*shape[:-2], 2 * shape[-2], shape[-1])
        low, high = box[-2]
        box = (*box[:-2], (low + first, high + first), box[-1])
    expert = _EXPERT.search(key)
    if expert:
        key = _EXPERT.sub(".experts.", key)
        if expert[1] is not None:
            box = ((int(expert[1]), int(expert[1]) + 1), *box)
    key = key.replace(".transformer_layer.", ".mtp_model_layer.")
    return Place(key, shape, box, sizes, local)


def saved_chunks(shape: ModelShape, vocab_divisor: int = 128) -> tuple[Chunk, ...]:
    """What Megatron saves of the model on one rank, in the order of the forward pass: no file yet.

    Every tensor of a layer is a chunk, and each expert's is. Layers share a tensor where none has
    experts, as Megatron has it by default. `vocab_divisor` pads the vocabulary's rows; any other
    padding loads too. Names are those of the learner's layer spec, Transformer Engine's.
    """
    model = megatron_layout(shape, LearnerMesh(), vocab_divisor, forms=("te", "grouped")).rank(0)
    return tuple(chunk for tensor in model.tensors for chunk in _saved(tensor, shape))


def extra_states(chunks: Iterable[Chunk]) -> tuple[str, ...]:
    """Keys of the empty objects that Megatron has beside weights of linears, and asks for.

    Not those of experts, whose form is Transformer Engine's own.

    >>> weight = Chunk("decoder.layers.mlp.linear_fc2.weight", (4, 8, 6), (3, 0, 2), (1, 8, 2), "f")
    >>> extra_states([weight])
    ('decoder.layers.mlp.linear_fc2._extra_state/shard_3_4',)
    """
    keys = []
    for chunk in chunks:
        module = _LINEAR.match(chunk.key)
        if module and ".experts.experts." not in chunk.key:
            shared = _LAYERS.match(chunk.key) is not None
            at, count = (chunk.offsets[0], chunk.shape[0]) if shared else (0, 1)
            keys.append(f"{module[1]}._extra_state/shard_{at}_{count}")
    return tuple(keys)


def _saved(tensor: LocalTensor, shape: ModelShape) -> Iterator[Chunk]:
    """The inverse of `place`, for whole tensors."""
    key = tensor.name.replace(".mtp_model_layer.", ".transformer_layer.")
    lead: tuple[tuple[int, int], ...] = ()  # (length, index) of the dims before the chunk's own
    layer = _NUMBERED.match(key)
    if layer and shape.moe is None:
        key = _NUMBERED.sub("decoder.layers.", key)
        lead = ((shape.num_layers, int(layer[1])),)
    own, leads = tensor.shape, [lead]
    if ".experts.linear_" in key:
        key = key.replace(".experts.", ".experts.experts.")
        num_experts, *rest = tensor.shape
        own, leads = tuple(rest), [(*lead, (num_experts, i)) for i in range(num_experts)]
    for lead in leads:
        lengths, at = tuple(length for length, _ in lead), tuple(index for _, index in lead)
        yield Chunk(key, (*lengths, *own), (*at, *(0 for _ in own)), (*(1 for _ in at), *own), "")


def dist_checkpoint_layout(shape: ModelShape, chunks: Sequence[Chunk]) -> Layout:
    """The layout of a checkpoint's files: rank i is `chunk_files(policy_chunks(chunks))[i]`.

    A chunk is the local tensor `place(chunk).local`. Raises LayoutError where the checkpoint is not
    of this model: a tensor is missing, in part or whole, stored twice, unknown or of another shape.
    """
    known = {chunk: place(chunk) for chunk in policy_chunks(chunks)}
    files = chunk_files(known)
    model = _model(shape, known)
    held = model.rank(0)
    shapes = {tensor.name: tensor.shape for tensor in held.tensors}
    _check_whole(known, shapes)
    pieces: dict[str, list[Piece]] = {}
    paddings: dict[str, list[Padding]] = {}
    for piece in held.pieces:
        pieces.setdefault(piece.local, []).append(piece)
    for padding in held.paddings:
        paddings.setdefault(padding.local, []).append(padding)
    ranks = {file: _Rank() for file in files}
    for chunk, found in known.items():
        ranks[chunk.file].add(found, pieces.get(found.name, ()), paddings.get(found.name, ()))
    parts = [rank.layout(number) for number, rank in enumerate(ranks.values())]
    kind = f"torch_dist checkpoint of {len(files)} files"
    return explicit_layout(kind, model.table, parts)


class _Rank:
    """One file's tensors as they are found."""

    def __init__(self) -> None:
        self.tensors: list[LocalTensor] = []
        self.pieces: list[Piece] = []
        self.paddings: list[Padding] = []

    def add(self, found: Place, pieces: Iterable[Piece], paddings: Iterable[Padding]) -> None:
        """A chunk, with what the whole tensor holds: the parts in its box are the chunk's."""
        lacking = len(found.box) - len(found.shape)
        self.tensors.append(LocalTensor(found.local, found.shape))
        for piece in pieces:
            shared = overlap(found.box, local_box(piece.box, piece.at))
            if shared is not None:
                box = tuple(
                    (start + low - at, start + high - at)
                    for (start, _), (low, high), at in zip(piece.box, shared, piece.at, strict=True)
                )
                at = tuple(box[0] for box in within(shared, found.box))
                self.pieces.append(Piece(piece.tensor, box, found.local, at[lacking:]))
        for padding in paddings:
            shared = overlap(found.box, padding.box)
            if shared is not None:
                inside = within(shared, found.box)
                self.paddings.append(Padding(found.local, inside[lacking:]))

    def layout(self, number: int) -> RankLayout:
        """All of it, as rank `number`."""
        return RankLayout(number, tuple(self.tensors), tuple(self.pieces), tuple(self.paddings))


def _model(shape: ModelShape, known: Mapping[Chunk, Place]) -> Layout:
    """The model on one rank, with the names of the layer spec that the checkpoint was saved with.

    Megatron saves grouped-query attention under Transformer Engine's names whatever the spec is.
    """
    rows, names = _vocabulary_rows(shape, known), {found.name for found in known.values()}
    te, local = (
        megatron_layout(shape, LearnerMesh(), rows, forms=(spec, "grouped"))
        for spec in ("te", "local")
    )
    return local if names <= {tensor.name for tensor in local.rank(0).tensors} else te


def _vocabulary_rows(shape: ModelShape, known: Mapping[Chunk, Place]) -> int:
    """Rows of the stored embedding, padding included: it depends on the TP that saved it."""
    for chunk in known:
        if chunk.key == EMBEDDING:
            if chunk.shape[0] < shape.vocab_size:
                raise LayoutError(
                    f"{chunk.file}: {EMBEDDING} has {chunk.shape[0]} rows for a vocabulary of "
                    f"{shape.vocab_size}; this checkpoint is of another model"
                )
            return chunk.shape[0]
    raise LayoutError(f"the checkpoint has no {EMBEDDING}; it is none of a Megatron GPTModel")


def _check_whole(known: Mapping[Chunk, Place], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise LayoutError unless the chunks tile every tensor of the model, and are of no other."""
    boxes: dict[str, list[Box]] = {name: [] for name in shapes}
    for chunk, found in known.items():
        shape = shapes.get(found.name)
        if shape is None:
            raise LayoutError(
                f"{chunk.file}: {chunk.key} is no tensor of the model that config.json describes; "
                f"it was looked for as {found.name}"
            )
        wanted = shape[len(shape) - len(found.whole) :]
        if found.whole != wanted or overlap(found.box, whole(shape)) != found.box:
            raise LayoutError(
                f"{chunk.file}: {chunk.key} at {list(chunk.offsets)} is of a tensor of shape "
                f"{list(found.whole)}, the model that config.json describes has {list(wanted)}; "
                "checkpoint and model do not belong together"
            )
        boxes[found.name].append(found.box)
    for name, found_boxes in boxes.items():
        cells = [cell for cell, _ in cut(found_boxes)]
        size, full = sum(map(num_elements, set(cells))), num_elements(whole(shapes[name]))
        if len(set(cells)) < len(cells):
            raise LayoutError(f"{name}: parts of it are stored in two chunks; save it again")
        if size < full:
            raise LayoutError(
                f"{name}: {size} of its {full} elements are in the checkpoint's "
                f"{len(found_boxes)} chunks of it; the checkpoint is not whole or of another model"
            )
