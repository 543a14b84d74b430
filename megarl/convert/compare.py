"""Two checkpoints of any formats and layouts, compared tensor by tensor in global coordinates.

Owns what equal means: the same names, shapes, types and bits. Reads part by part; where the formats
differ, the parts are the moves of a plan from one to the other, which is proved to name each
element once. Knows nothing of how a comparison is printed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from megarl.actor.config_fields import read_json
from megarl.actor.parameters import STACKED, Parameter
from megarl.convert.formats import CONFIG, Found
from megarl.convert.numbers import Bits, tensor_of
from megarl.convert.opened import Checkpoint, open_checkpoint
from megarl.convert.progress import Progress
from megarl.convert.stored import bands, stored_in, whole_bits
from megarl.errors import CheckpointError
from megarl.reshard.files import FLOAT8, STORED, StoredTensor, read_headers
from megarl.reshard.layout import Box, local_box, whole
from megarl.reshard.moves import Move
from megarl.reshard.plan import make_plan
from megarl.weight_sync.checksum import add, box_checksum

ALIKE = "BF16"  # what float8 is read as where the other side has none
PART_BYTES = 1 << 23  # of a tensor, held at once
WIDEST = 4  # bytes of the largest type of a weight


@dataclass(frozen=True, slots=True)
class Facts:
    """What a checkpoint says of one tensor."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Difference:
    """Elements of a tensor that differ: how many, all within `box`, `largest` by magnitude.

    `largest` is infinity where only one side has a number.
    """

    name: str
    box: Box
    num_elements: int
    largest: float

    def joined(self, other: Difference) -> Difference:
        """Both parts of one tensor together."""
        box = tuple(
            (min(a, c), max(b, d)) for (a, b), (c, d) in zip(self.box, other.box, strict=True)
        )
        largest = max(self.largest, other.largest)
        return Difference(self.name, box, self.num_elements + other.num_elements, largest)


@dataclass(frozen=True)
class Comparison:
    """What was found, in the order of the first checkpoint. Tensors of other shapes are not read.

    `digests` are of all tensors read, the same whatever their formats where the bits are the same.
    """

    left: Mapping[str, Facts]
    right: Mapping[str, Facts]
    differences: Mapping[str, Difference]
    digests: tuple[int, int]

    @property
    def only(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names that only one side has."""
        return (
            tuple(name for name in self.left if name not in self.right),
            tuple(name for name in self.right if name not in self.left),
        )

    def unlike(self, what: str) -> tuple[str, ...]:
        """Names of tensors whose `shape` or `dtype` differ."""
        return tuple(
            name
            for name, facts in self.left.items()
            if name in self.right and getattr(facts, what) != getattr(self.right[name], what)
        )

    @property
    def is_equal(self) -> bool:
        """Whether names, shapes, types and bits are all the same."""
        unlike = (*self.unlike("shape"), *self.unlike("dtype"))
        return not (any(self.only) or unlike or self.differences)


@dataclass(frozen=True, slots=True)
class _Part:
    """The same box of one tensor, as both sides have it."""

    name: str
    shape: tuple[int, ...]
    box: Box
    left: Bits
    right: Bits
    dtypes: tuple[str, str]


@dataclass
class _Sums:
    """What is added up over the parts."""

    progress: Progress
    differences: dict[str, Difference] = field(default_factory=dict)
    digests: tuple[int, int] = (0, 0)

    def take(self, part: _Part) -> None:
        sums = [
            box_checksum(tensor_of(bits, dtype), part.name, part.shape, part.box)
            for bits, dtype in zip((part.left, part.right), part.dtypes, strict=True)
        ]
        self.progress.add(part.left.nbytes + part.right.nbytes)
        self.digests = (add((self.digests[0], sums[0])), add((self.digests[1], sums[1])))
        found = _difference(part)
        if found is not None:
            known = self.differences.get(part.name)
            self.differences[part.name] = found if known is None else known.joined(found)


def compare(left: Found, right: Found) -> Comparison:
    """Compare two checkpoints. Raises CheckpointError, ModelError or LayoutError where one is not
    whole, is of no known format, or has no config.json where that is needed."""
    if left.format == right.format == "hf" and _quantization(left) == _quantization(right):
        return _by_name(read_headers(left.path), read_headers(right.path))
    return _by_plan(open_checkpoint(left, ALIKE), open_checkpoint(right, ALIKE))


def _quantization(found: Found) -> object:
    return read_json(found.path / CONFIG, required=False).get("quantization_config")


Headers = Mapping[Path, Mapping[str, StoredTensor]]


def _by_name(left: Headers, right: Headers) -> Comparison:
    """Of one format: every tensor by its name, also where nothing is known of the model."""
    sides = [
        {name: (path, stored) for path, header in side.items() for name, stored in header.items()}
        for side in (left, right)
    ]
    facts = [
        {name: Facts(stored.shape, stored.dtype) for name, (_, stored) in side.items()}
        for side in sides
    ]
    both = [name for name, fact in facts[0].items() if _is_alike(fact, facts[1].get(name))]
    sums = _Sums(Progress(sum(2 * _num_bytes(sides[0][name][1]) for name in both)))
    for name in both:
        (left_path, ours), (right_path, theirs) = sides[0][name], sides[1][name]
        if not {ours.dtype, theirs.dtype} <= STORED.keys():  # a type unknown here: by its bytes
            if _num_bytes(ours) != _num_bytes(theirs):
                box = whole(ours.shape)
                found = Difference(name, box, math.prod(ours.shape), math.inf)
                sums.differences[name] = found
                continue
            ours, theirs = (
                replace(one, dtype=FLOAT8, shape=(_num_bytes(one),)) for one in (ours, theirs)
            )
        for part in _parts(name, (left_path, ours), (right_path, theirs)):
            sums.take(part)
    sums.progress.end()
    return Comparison(facts[0], facts[1], sums.differences, sums.digests)


def _is_alike(left: Facts, right: Facts | None) -> bool:
    return right is not None and left.shape == right.shape


def _num_bytes(stored: StoredTensor) -> int:
    return stored.end - stored.start


def _parts(
    name: str, left: tuple[Path, StoredTensor], right: tuple[Path, StoredTensor]
) -> Iterator[_Part]:
    """A tensor part by part."""
    shape = left[1].shape or (1,)
    dtypes = left[1].dtype, right[1].dtype
    tensors = [stored_in(path, stored).reshaped(shape) for path, stored in (left, right)]
    for box, _ in bands(whole(shape), WIDEST, num_bytes=PART_BYTES):
        ours, theirs = (
            whole_bits(tensor, STORED[dtype], box)
            for tensor, dtype in zip(tensors, dtypes, strict=True)
        )
        yield _Part(name, shape, box, ours, theirs, dtypes)


def _by_plan(left: Checkpoint, right: Checkpoint) -> Comparison:
    """Of different formats: what the plan from one to the other pairs."""
    facts = [_facts(side) for side in (left, right)]
    if {n: f.shape for n, f in facts[0].items()} != {n: f.shape for n, f in facts[1].items()}:
        return Comparison(facts[0], facts[1], {}, (0, 0))
    parameters = {parameter.name: parameter for parameter in left.layout.parameters}
    plan = make_plan(left.layout, right.layout, policy_bytes=WIDEST)
    total = sum(
        _itemsize(side, name) * p.num_elements for side in facts for name, p in parameters.items()
    )
    sums = _Sums(Progress(total))
    for rank in right.layout.rank_ids:
        for move in sorted(plan.receives(rank), key=lambda move: (move.dst_local, move.src)):
            for part in _paired(move, parameters[move.tensor], left, right):
                sums.take(part)
    sums.progress.end()
    order = {name: number for number, name in enumerate(parameters)}
    names = sorted(sums.differences, key=lambda name: order[_stack_of(name, order)])
    found = {name: sums.differences[name] for name in names}
    return Comparison(facts[0], facts[1], found, sums.digests)


def _itemsize(facts: Mapping[str, Facts], name: str) -> int:
    dtype = facts[name].dtype
    return STORED[ALIKE if dtype == FLOAT8 else dtype.partition("+")[0]].itemsize


def _paired(
    move: Move, parameter: Parameter, left: Checkpoint, right: Checkpoint
) -> Iterator[_Part]:
    """What a move pairs, part by part."""
    name, shape, first = move.tensor, parameter.shape, 0
    if parameter.stacked and move.box[0][1] - move.box[0][0] == 1:  # one expert: as its tensor
        name, shape, first = name.replace(STACKED, str(move.box[0][0])), shape[1:], 1
    dtypes = left.dtypes[move.src][move.src_local], right.dtypes[move.dst][move.dst_local]
    tensors = (
        left.tensor(move.src, move.src_local),
        right.tensor(move.dst, move.dst_local),
    )
    for box, index in bands(move.box, WIDEST, num_bytes=PART_BYTES):
        extent = tuple(end - start for start, end in box[first:])
        try:
            ours, theirs = (
                whole_bits(tensor, STORED[dtype], _local(move.box, at, index)).reshape(extent)
                for tensor, dtype, at in zip(
                    tensors, dtypes, (move.src_at, move.dst_at), strict=True
                )
            )
        except OverflowError as error:  # of float8, whose scales may be anything
            raise CheckpointError(f"{name}: {error}") from error
        yield _Part(name, shape, box[first:], ours, theirs, dtypes)


def _local(box: Box, at: tuple[int, ...], index: tuple[slice, ...]) -> Box:
    """Where the part `index` of a move's box lies in the local tensor that has it from `at` on."""
    local = local_box(box, at)
    added = max(0, len(at) - len(box))
    own = index[len(index) - len(at) + added :]
    return local[:added] + tuple(
        (start + part.start, start + part.stop)
        for (start, _), part in zip(local[added:], own, strict=True)
    )


def _stack_of(name: str, known: Mapping[str, int]) -> str:
    """The parameter that a tensor is, or is one expert of."""
    if name in known:
        return name
    head, _, tail = name.partition(".experts.")
    return f"{head}.experts.{STACKED}.{tail.partition('.')[2]}"


def _facts(side: Checkpoint) -> dict[str, Facts]:
    """Of each parameter; the experts of a layer are one."""
    dtypes = side.parameter_dtypes()
    if side.shape.fp8_block:
        dtypes |= {p.name: FLOAT8 for p in side.layout.parameters if p.quantized}
    return {p.name: Facts(p.shape, dtypes[p.name]) for p in side.layout.parameters}


def _difference(part: _Part) -> Difference | None:
    """Where and by how much the two sides differ; None where they do not."""
    sides = (part.left, part.right)
    if part.dtypes[0] == part.dtypes[1]:
        ours, theirs = (bits.view(f"u{bits.itemsize}") for bits in sides)
        if np.array_equal(ours, theirs):
            return None
        mask = ours != theirs
        sides = (part.left[mask], part.right[mask])
    numbers = [_numbers(bits, dtype) for bits, dtype in zip(sides, part.dtypes, strict=True)]
    apart = _apart(*numbers)
    if part.dtypes[0] != part.dtypes[1]:
        mask = (apart > 0).numpy()
    if not mask.any():
        return None
    return Difference(part.name, _around(mask, part.box), int(mask.sum()), float(apart.max()))


def _apart(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """|left - right|; 0 where both are the same infinity or none a number, else infinity there."""
    same = (left == right) | (left.isnan() & right.isnan())
    apart = (left - right).abs()
    return torch.where(same, 0.0, torch.where(apart.isnan(), math.inf, apart))


def _numbers(bits: Bits, dtype: str) -> torch.Tensor:
    """float64 of the bits."""
    return tensor_of(bits, dtype).to(torch.float64)


def _around(mask: Bits, box: Box) -> Box:
    """The smallest box around the true elements, counted in the tensor that `box` is of."""
    found = []
    for dim, (start, _) in enumerate(box):
        others = tuple(other for other in range(mask.ndim) if other != dim)
        places = np.flatnonzero(mask.any(axis=others))
        found.append((start + int(places[0]), start + int(places[-1]) + 1))
    return tuple(found)
