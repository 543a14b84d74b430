"""Which decoder layers each model chunk of each pipeline stage holds, and where the ends go.

Owns Megatron's rules for splitting a model over a pipeline: even, interleaved, uneven, and layouts
written out. Knows nothing of tensors. Source: megatron-core 0.19.2, get_num_layers_to_build and
get_transformer_layer_offset (transformer_block.py, transformer_layer.py) and
pipeline_parallel_layer_layout.py; the tests compare with those functions.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megarl.errors import LayoutError

EMBEDDING, LAYER, MTP, LOSS = "E", "t", "m", "L"
"""What a layout string is made of: the embedding, a decoder layer, an MTP layer, the loss."""

MAX_SYMBOLS = 100_000
"""Of a layout string, written out: it is spelled before it is compared with a model."""

MAX_SHOWN = 80  # characters of a layout string in an error

_ITEM = re.compile(
    r"\((?P<group>[^()]+)\)\*(?P<times>[0-9]+)|(?P<char>[EtmL|])(?:\*(?P<copies>[0-9]+))?"
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One model chunk: decoder layers [first, end), `num_mtp` MTP layers, and the ends it has.

    `loss` is where logits are computed: the head is there.
    """

    first: int
    end: int
    embedding: bool = False
    num_mtp: int = 0
    loss: bool = False

    @property
    def num_layers(self) -> int:
        """Decoder layers of the chunk."""
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Chunk v of stage p is `chunks[p][v]`; the forward pass visits v = 0 of every stage first.

    >>> two = Pipeline.even(8, pp=2, vpp=2)
    >>> [[(c.first, c.end) for c in stage] for stage in two.chunks]
    [[(0, 2), (4, 6)], [(2, 4), (6, 8)]]
    """

    chunks: tuple[tuple[Chunk, ...], ...]

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return len(self.chunks)

    @property
    def vpp(self) -> int:
        """Model chunks of each stage."""
        return len(self.chunks[0])

    @property
    def num_layers(self) -> int:
        """Decoder layers over all chunks."""
        return max(chunk.end for _, _, chunk in self)

    @property
    def num_mtp(self) -> int:
        """MTP layers over all chunks."""
        return sum(chunk.num_mtp for _, _, chunk in self)

    def __iter__(self) -> Iterator[tuple[int, int, Chunk]]:
        """(p, v, chunk) in the order of the forward pass."""
        for v in range(self.vpp):
            for p in range(self.pp):
                yield p, v, self.chunks[p][v]

    def has_final_norm(self, chunk: Chunk) -> bool:
        """Whether the norm behind the last decoder layer is in the chunk.

        It is before the loss; with MTP layers, right behind the last decoder layer.
        """
        if self.num_mtp:
            return chunk.num_layers > 0 and chunk.end == self.num_layers
        return chunk.loss

    @classmethod
    def even(
        cls,
        num_layers: int,
        pp: int,
        vpp: int = 1,
        *,
        num_mtp: int = 0,
        embedding_counts: bool = False,
        loss_counts: bool = False,
    ) -> Pipeline:
        """The same number of layers everywhere; MTP layers are before the loss.

        `embedding_counts` and `loss_counts` are Megatron's account_for_embedding_in_pipeline_split
        and account_for_loss_in_pipeline_split: that end takes the place of one layer.

        >>> [c.num_layers for _, _, c in Pipeline.even(6, 4, embedding_counts=True,
        ...                                            loss_counts=True)]
        [1, 2, 2, 1]
        """
        _check_sizes(num_layers, pp, vpp)
        counted = num_layers + embedding_counts + loss_counts
        ends = [name for name, on in (("embedding", embedding_counts), ("loss", loss_counts)) if on]
        if counted % (pp * vpp):
            unit = "pp" if vpp == 1 else "number of chunks"
            raise LayoutError(
                f"{num_layers} layers{''.join(f' and the {end}' for end in ends)} do not split "
                f"evenly over {_chunks(pp, vpp)}; use a {unit} that divides {counted}, or an "
                "uneven pipeline"
            )
        sizes = [counted // (pp * vpp)] * (pp * vpp)
        sizes[0] -= embedding_counts
        sizes[-1] -= loss_counts
        if min(sizes) < 0:
            raise LayoutError(
                f"{num_layers} layers are too few for {_chunks(pp, vpp)} of which the one is both "
                "first and last; do not count the embedding or the loss"
            )
        return _in_order(sizes, pp, vpp, num_mtp)

    @classmethod
    def uneven(
        cls,
        num_layers: int,
        pp: int,
        first: int | None = None,
        last: int | None = None,
        vpp: int = 1,
        *,
        num_mtp: int = 0,
    ) -> Pipeline:
        """`first` layers on the first stage, `last` on the last, the same number on the others.

        These are Megatron's num_layers_in_first_pipeline_stage and
        num_layers_in_last_pipeline_stage.

        >>> [c.num_layers for _, _, c in Pipeline.uneven(61, 16, first=4, last=1)]
        [4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 1]
        """
        _check_sizes(num_layers, pp, vpp)
        given = [(name, n) for name, n in (("first", first), ("last", last)) if n is not None]
        middle_stages, middle = pp - len(given), num_layers - sum(n for _, n in given)
        for name, count in given:
            if count < 1:
                raise LayoutError(f"{count} layers in the {name} pipeline stage; use 1 or more")
            if count % vpp:
                raise LayoutError(
                    f"{count} layers in the {name} pipeline stage do not split over vpp={vpp}; "
                    f"use a multiple of {vpp}"
                )
        if middle_stages < 0 or middle < 0 or (middle_stages == 0) != (middle == 0):
            raise LayoutError(
                f"{middle} of {num_layers} layers are left for {middle_stages} of {pp} pipeline "
                "stages; change the layers in the first or last stage"
            )
        if middle_stages and middle % (middle_stages * vpp):
            raise LayoutError(
                f"the {middle} layers left do not split over {_chunks(middle_stages, vpp)}; "
                "change the layers in the first or last stage, or write the layout out"
            )
        if not middle_stages and vpp > 1:
            raise LayoutError(
                f"Megatron 0.19 cannot number the layers of pp={pp} with vpp={vpp} when both first "
                "and last are given; give one of them"
            )
        per_stage = [middle // middle_stages] * middle_stages if middle_stages else []
        per_stage = [*([first] if first else []), *per_stage, *([last] if last else [])]
        return _in_order([count // vpp for count in per_stage] * vpp, pp, vpp, num_mtp)

    @classmethod
    def from_layout(cls, layout: str, pp: int) -> Pipeline:
        """A pipeline written out, as Megatron's pipeline_model_parallel_layout.

        `E` is the embedding, `t` a decoder layer, `m` an MTP layer, `L` the loss, `|` ends a chunk;
        `x*n` and `(..)*n` repeat, commas do nothing. Chunk i is chunk i // pp of stage i % pp.

        >>> written = Pipeline.from_layout("Et*3|(tt|)*2,m|L", pp=5)
        >>> [(c.first, c.end, c.num_mtp) for _, _, c in written]
        [(0, 3, 0), (3, 5, 0), (5, 7, 0), (7, 7, 1), (7, 7, 0)]
        """
        if pp < 1:
            raise LayoutError(f"pipeline: pp is {pp}; use 1 or more")
        written = _expand(layout).split("|")
        if len(written) % pp:
            raise LayoutError(
                f"pipeline layout {_shown(layout)} has {len(written)} chunks; pp={pp} must "
                "divide them"
            )
        _check_layout(layout, written, pp)
        ends = list(itertools.accumulate(chunk.count(LAYER) for chunk in written))
        chunks = [
            Chunk(
                end - chunk.count(LAYER),
                end,
                EMBEDDING in chunk,
                chunk.count(MTP),
                LOSS in chunk,
            )
            for chunk, end in zip(written, ends, strict=True)
        ]
        return cls(tuple(tuple(chunks[p::pp]) for p in range(pp)))


def _check_sizes(num_layers: int, pp: int, vpp: int) -> None:
    for name, value in (("layers", num_layers), ("pp", pp), ("vpp", vpp)):
        if value < 1:
            raise LayoutError(f"pipeline: {name} is {value}; use 1 or more")
    if vpp > 1 and pp == 1:
        raise LayoutError(f"vpp={vpp} with pp=1: chunks interleave over stages; use a larger pp")


def _chunks(pp: int, vpp: int) -> str:
    return f"learner.parallel.pp={pp}" + (f" x vpp={vpp}" if vpp > 1 else "")


def _in_order(sizes: Sequence[int], pp: int, vpp: int, num_mtp: int) -> Pipeline:
    """Chunks of so many layers, in the order of the forward pass."""
    last = pp * vpp - 1
    ends = itertools.accumulate(sizes)
    chunks = [
        Chunk(end - size, end, i == 0, num_mtp if i == last else 0, i == last)
        for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    return Pipeline(tuple(tuple(chunks[p::pp]) for p in range(pp)))


def _expand(layout: str) -> str:
    """A layout string without commas and repetitions."""
    text = layout.replace(",", "")
    parts, at, length = [], 0, 0
    while at < len(text):
        found = _ITEM.match(text, at)
        if found is None:
            raise LayoutError(
                f"pipeline layout {_shown(layout)}: {_shown(text[at:])} cannot be read; write E, "
                "t, m, L, |, x*n, or (..)*n without another ( inside"
            )
        unit = found["char"] or _expand(found["group"])
        digits = (found["times"] or found["copies"] or "1").lstrip("0") or "0"
        # As many digits are too many; int() refuses thousands of them.
        times = int(digits) if len(digits) <= len(str(MAX_SYMBOLS)) else MAX_SYMBOLS + 1
        length += len(unit) * times
        if length > MAX_SYMBOLS:
            raise LayoutError(
                f"pipeline layout {_shown(layout)} has more than {MAX_SYMBOLS} symbols when its "
                "repetitions are written out; use smaller numbers"
            )
        parts.append(unit * times)
        at = found.end()
    return "".join(parts)


def _shown(layout: str) -> str:
    """A layout, or a part of one, in an error: cut short where it is long."""
    return repr(layout if len(layout) <= MAX_SHOWN else layout[:MAX_SHOWN] + "...")


def _check_layout(layout: str, written: Sequence[str], pp: int) -> None:
    """Refuse what Megatron does not build as it is written."""

    def refuse(reason: str) -> LayoutError:
        return LayoutError(f"pipeline layout {_shown(layout)}: {reason}")

    flat = "".join(written)
    for name, symbol in (("embedding", EMBEDDING), ("loss", LOSS)):
        if flat.count(symbol) != 1:
            raise refuse(
                f"{symbol}, the {name}, is there {flat.count(symbol)} times; once is right"
            )
    # Megatron looks only for the first and the last symbol, but builds these ends on the first and
    # the last chunk in any case.
    if not written[0].startswith(EMBEDDING):
        raise refuse("the first chunk must begin with E; Megatron builds the embedding there")
    if not written[-1].endswith(LOSS):
        raise refuse("the last chunk must end with L; Megatron builds the head there")
    if LAYER not in flat:
        raise refuse("it has no decoder layer")
    homes = [i for i, chunk in enumerate(written) if MTP in chunk]
    if len(homes) > 1:
        raise refuse("its MTP layers are in several chunks; put all in one")
    if homes and LAYER in flat[flat.index(MTP) :]:
        raise refuse("a decoder layer comes behind an MTP layer; put MTP layers last")
    if homes and homes[0] < len(written) - pp:
        raise refuse("its MTP layers are not in their stage's last chunk; move them there")
    if homes and pp > 1 and homes[0] > 0 and homes[0] % pp == 0:
        # Two chunks of the first stage would each wait for one sum over the embedding's ranks
        # (LanguageModule._is_in_embd_group): Megatron hangs as it builds the model.
        raise refuse("its MTP layers are in a later chunk of the first stage; move them behind it")
