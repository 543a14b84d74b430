"""Many copies between tensors of one device in a few calls.

A plan's moves are boxes; on a GPU each would cost a launch, and Python more than the copy. Owns
putting boxes that repeat at equal distances together into one strided view, in units as wide as the
memory allows, and copying all views at once. Knows nothing of plans, arenas or checksums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from megarl.reshard import execute
from megarl.reshard.moves import Move
from megarl.weight_sync import compiled, parts

# In the order tried. Copies do not compute: 16 bytes of any type travel as one complex number.
_UNITS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
PART_BYTES = 2 << 20  # of copies on a CPU, which its cores take turns at
PAST_CACHES_BYTES = 32 << 20
"""From here on what a CPU copies in all is not in its caches afterwards anyway."""
SINGLE_BYTES = 32 << 20
"""From here on a copy is worth a call: it takes 16 us at 4 TB/s read and written."""


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of the tensor `name`: its offset from the first element, sizes, strides."""

    name: str
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy one view into another, of equal sizes, in units of `unit` bytes (0: elements).

    `is_plain` says that both sides are contiguous and of one type.
    """

    source: View
    destination: View
    unit: int = 0
    is_plain: bool = False


def pays(device: torch.device) -> bool:
    """Whether batches are quicker than single copies into tensors of `device`."""
    return device.type != "cpu"


def batch(
    moves: Iterable[Move],
    sources: Mapping[str, torch.Tensor],
    destinations: Mapping[str, torch.Tensor],
) -> tuple[Copy, ...]:
    """The copies that carry out `moves` between these tensors."""
    found: list[Copy] = []
    pending: list[Copy] = []
    for move in moves:
        copy = Copy(
            _view(move.src_local, sources, execute.read(move, sources)),
            _view(move.dst_local, destinations, execute.written(move, destinations)),
        )
        if pending and not _continues(pending, copy):
            found.append(_merged(pending))
            pending = []
        pending.append(copy)
    if pending:
        found.append(_merged(pending))
    return tuple(_widened(copy, sources, destinations) for copy in found)


def addresses(tensors: Mapping[str, torch.Tensor]) -> tuple[object, ...]:
    """Where tensors of known shapes and types lie, and how: what views of them depend on."""
    return tuple((tensor.data_ptr(), tensor.stride()) for tensor in tensors.values())


class Prepared:
    """The views of a batch, ready to be copied again and again while no tensor moves.

    Contiguous copies of `single_bytes` or more are single ones, which the device's copy engine or
    its widest kernel does; smaller ones share kernel launches; torch loops over what is strided or
    changes its type.
    """

    def __init__(
        self,
        copies: Sequence[Copy],
        sources: Mapping[str, torch.Tensor],
        destinations: Mapping[str, torch.Tensor],
        single_bytes: int = SINGLE_BYTES,
    ) -> None:
        units: dict[tuple[int, str, int], torch.Tensor] = {}
        self.copies = tuple(copies)
        self._single: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Of one type in a list: torch then launches them together.
        self._together: dict[torch.dtype | None, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for copy in copies:
            to = _tensor(copy.destination, copy.unit, destinations, 0, units)
            of = _tensor(copy.source, copy.unit, sources, 1, units)
            if copy.is_plain and of.numel() * of.element_size() >= single_bytes:
                self._single.append((to, of))
                continue
            lists = self._together.setdefault(of.dtype if copy.is_plain else None, ([], []))
            lists[0].append(to)
            lists[1].append(of)

    def run(self) -> int:
        """Carry out all copies; returns the number of calls it took."""
        for destination, source in self._single:
            destination.copy_(source)
        for destinations, sources in self._together.values():
            torch._foreach_copy_(destinations, sources)
        return len(self._single) + len(self._together)


class OneByOne:
    """The views of moves as they are, ready likewise: a CPU gains nothing where they are merged.

    Its cores share the copies, in parts of about `part_bytes`; no two write to one place.
    """

    def __init__(
        self,
        moves: Iterable[Move],
        sources: Mapping[str, torch.Tensor],
        destinations: Mapping[str, torch.Tensor],
        part_bytes: int = PART_BYTES,
    ) -> None:
        self._parts: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        room = num_bytes = 0
        for move in moves:
            of, to = execute.read(move, sources), execute.written(move, destinations)
            rows = to.shape[0] if to.dim() else 1
            step = max(1, part_bytes * rows // max(1, to.numel() * to.element_size()))
            for at in range(0, rows, step) if step < rows else (None,):
                pair = (to, of) if at is None else (to[at : at + step], of[at : at + step])
                if room <= 0:
                    self._parts.append([])
                    room = part_bytes
                self._parts[-1].append(pair)
                room -= pair[0].nbytes
                num_bytes += pair[0].nbytes
        self._library = compiled.find() if num_bytes >= PAST_CACHES_BYTES else None

    def run(self) -> int:
        """Carry out all copies; returns the number of calls it took."""
        work = [partial(_copy_all, part, self._library) for part in self._parts]
        parts.run(work, parts.num_threads())
        return sum(len(part) for part in self._parts)


def _copy_all(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], library: compiled.Library | None
) -> None:
    for to, of in pairs:
        are_alike = to.dtype == of.dtype and to.shape == of.shape
        if library and are_alike and to.is_contiguous() and of.is_contiguous():
            library.copy(to.data_ptr(), of.data_ptr(), to.nbytes)
        else:
            to.copy_(of)


def _view(name: str, tensors: Mapping[str, torch.Tensor], part: torch.Tensor) -> View:
    offset = int(part.storage_offset()) - int(tensors[name].storage_offset())
    return View(name, offset, tuple(part.shape), tuple(part.stride()))


def _continues(pending: list[Copy], copy: Copy) -> bool:
    """Whether `copy` is one more of the pending ones, at the distance that they have."""
    last = pending[-1]
    for mine, theirs in ((copy.source, last.source), (copy.destination, last.destination)):
        same = (mine.name, mine.sizes, mine.strides) == (theirs.name, theirs.sizes, theirs.strides)
        if not same or mine.offset <= theirs.offset:
            return False
    return len(pending) == 1 or _steps(last, copy) == _steps(pending[0], pending[1])


def _steps(first: Copy, second: Copy) -> tuple[int, int]:
    return (
        second.source.offset - first.source.offset,
        second.destination.offset - first.destination.offset,
    )


def _merged(pending: list[Copy]) -> Copy:
    """One copy, with the repetition as its first dim, and without dims that need not be."""
    first = pending[0]
    if len(pending) > 1:
        steps = _steps(first, pending[1])
        views = [
            View(view.name, view.offset, (len(pending), *view.sizes), (step, *view.strides))
            for view, step in zip((first.source, first.destination), steps, strict=True)
        ]
        first = Copy(views[0], views[1])
    return _folded(first)


def _folded(copy: Copy) -> Copy:
    """The same copy with neighbouring dims put together where both sides allow it."""
    dims: list[tuple[int, int, int]] = []  # size, stride of the source, of the destination
    for size, a, b in zip(
        copy.source.sizes, copy.source.strides, copy.destination.strides, strict=True
    ):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * a and dims[-1][2] == size * b:
            dims[-1] = (dims[-1][0] * size, a, b)
        else:
            dims.append((size, a, b))
    dims = dims or [(1, 1, 1)]
    sizes = tuple(size for size, _, _ in dims)
    return Copy(
        View(copy.source.name, copy.source.offset, sizes, tuple(a for _, a, _ in dims)),
        View(copy.destination.name, copy.destination.offset, sizes, tuple(b for _, _, b in dims)),
    )


def _is_dense(view: View) -> bool:
    expected = 1
    for size, stride in zip(reversed(view.sizes), reversed(view.strides), strict=True):
        if stride != expected:
            return False
        expected *= size
    return True


def _widened(
    copy: Copy, sources: Mapping[str, torch.Tensor], destinations: Mapping[str, torch.Tensor]
) -> Copy:
    """The copy in the widest unit in which both sides are whole; as it is where types differ."""
    sides = ((copy.source, sources), (copy.destination, destinations))
    if sources[copy.source.name].dtype != destinations[copy.destination.name].dtype:
        return copy
    is_plain = _is_dense(copy.source) and _is_dense(copy.destination)
    itemsize = sources[copy.source.name].element_size()
    for unit in _UNITS:
        ratio = unit // itemsize
        if ratio >= 1 and all(_fits(view, tensors[view.name], ratio) for view, tensors in sides):
            views = [_in_units(view, ratio) for view, _ in sides]
            return Copy(views[0], views[1], unit, is_plain)
    return replace(copy, is_plain=is_plain)


def _fits(view: View, tensor: torch.Tensor, ratio: int) -> bool:
    unit = ratio * tensor.element_size()
    numbers = (view.offset, view.sizes[-1], *view.strides[:-1], tensor.numel())
    return (
        view.strides[-1] == 1
        and tensor.is_contiguous()
        and tensor.data_ptr() % unit == 0
        and tensor.storage_offset() % ratio == 0
        and all(number % ratio == 0 for number in numbers)
    )


def _in_units(view: View, ratio: int) -> View:
    sizes = (*view.sizes[:-1], view.sizes[-1] // ratio)
    strides = (*(stride // ratio for stride in view.strides[:-1]), 1)
    return View(view.name, view.offset // ratio, sizes, strides)


def _tensor(
    view: View,
    unit: int,
    tensors: Mapping[str, torch.Tensor],
    side: int,
    units: dict[tuple[int, str, int], torch.Tensor],
) -> torch.Tensor:
    """The view itself; `units` keeps each whole tensor in each unit for the next views of it."""
    whole = units.get((side, view.name, unit))
    if whole is None:
        whole = tensors[view.name].detach()
        if unit:
            whole = whole.view(-1).view(_UNITS[unit])
        units[side, view.name, unit] = whole
    return whole.as_strided(view.sizes, view.strides, whole.storage_offset() + view.offset)
