"""The additive 64-bit checksum of a weight sync: shards add up to the whole without a gather.

Owns the arithmetic that learner and server share, on hosts (in C where that was compiled, else in
numpy, bit for bit the same) and on devices. Knows nothing of layouts, ranks or transports: it is
given the values of one box of one global tensor.

    C = sum over chunks of mix64(tensor id, chunk) * (sum of element bits * (2i + 1))   modulo 2^64

Chunks are 32,768 elements in global row-major order, `i` is the element's index within its chunk,
element bits are the unsigned integer of the wire dtype's bit pattern. A sum over any partition of a
tensor into boxes is the sum of the tensor, so that skipped, doubled, swapped or changed elements
show.
"""

# R runs (stretches that are contiguous in global order), L elements of a run

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from megarl.errors import ShapeError
from megarl.weight_sync import compiled

CHUNK = 32_768
_MASK = (1 << 64) - 1
_BLOCK = 2 * CHUNK  # elements in one pass: its 8-byte form stays in a core's second-level cache
_TORCH_BLOCK = 1 << 22  # elements in one pass on a device, bounding what 8-byte temporaries take

UInt64Array = npt.NDArray[np.uint64]
BitsArray = npt.NDArray[np.unsignedinteger]


def tensor_id(name: str) -> int:
    """A stable 64-bit number for a Hugging Face tensor name.

    >>> hex(tensor_id("model.norm.weight"))
    '0x3bbd05d3e6d4d252'
    """
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def mix64(identity: int, chunks: UInt64Array) -> UInt64Array:
    """The odd multiplier of each chunk, from splitmix64's finalizer (Steele et al. 2014).

    Odd, so that a change of one chunk's inner sum always changes the total.
    """
    with np.errstate(over="ignore"):
        z = chunks * np.uint64(0x9E3779B97F4A7C15) + np.uint64(identity)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def add(sums: Sequence[int]) -> int:
    """Sums of disjoint parts, put together modulo 2^64."""
    return sum(sums) & _MASK


def box_checksum(
    values: torch.Tensor,
    name: str,
    shape: Sequence[int],
    box: Sequence[tuple[int, int]],
) -> int:
    """The part of tensor `name` (global `shape`) in `box`, from `values` of the box's shape.

    `values` may be any strided view, on any device; its dtype is the wire dtype.
    Raises ShapeError where `values` has not the shape of the box.
    """
    extent = tuple(stop - start for start, stop in box)
    if tuple(values.shape) != extent or len(box) != len(shape):
        raise ShapeError(
            f"{name}: values of shape {tuple(values.shape)} for box {tuple(box)} of "
            f"{tuple(shape)}; a checksum needs exactly the elements of the box"
        )
    if 0 in extent:
        return 0
    values = values.detach()
    if values.device.type != "cpu":
        starts, length = runs(shape, box)
        return _device_sum(values.reshape(len(starts), length), tensor_id(name), starts)
    if values.stride(-1) != 1:
        values = values.contiguous()
    starts, length = runs(shape, box, values.stride())
    bits = _bits(values)
    rows = bits.reshape(len(starts), length)
    in_c = compiled.find()
    if in_c is not None:
        return in_c.sum_runs(rows, starts, tensor_id(name))
    return _host_sum(rows, tensor_id(name), starts)


def runs(
    shape: Sequence[int],
    box: Sequence[tuple[int, int]],
    memory: Sequence[int] | None = None,
) -> tuple[UInt64Array, int]:
    """Global index of each run's first element [R], and the length of every run.

    Where `memory`, the strides of the values, is given, runs lie whole in memory too.
    """
    inner, length = len(shape), 1
    while inner > 0:
        start, stop = box[inner - 1]
        if memory is not None and stop - start > 1 and memory[inner - 1] != length:
            break
        inner -= 1
        length *= stop - start
        if stop - start != shape[inner]:
            break
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    starts = np.full(1, sum(box[d][0] * strides[d] for d in range(inner, len(shape))), np.uint64)
    for dim in range(inner - 1, -1, -1):
        steps = np.arange(box[dim][0], box[dim][1], dtype=np.uint64) * np.uint64(strides[dim])
        starts = (steps[:, None] + starts[None, :]).reshape(-1)
    return starts, length


_UNSIGNED = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}


def _bits(values: torch.Tensor) -> BitsArray:
    """The bit patterns of a host tensor as unsigned integers, without a copy.

    Not by `values.numpy()`, after which live weights could never again leave the learner's memory:
    torch then refuses to resize their storage, for good.
    """
    integer, unsigned = _UNSIGNED[values.element_size()]
    array: BitsArray = np.from_dlpack(values.view(integer)).view(unsigned)
    return array


def _host_sum(rows: BitsArray, identity: int, starts: UInt64Array) -> int:
    """The sum over runs `rows` [R, L], of which run r starts at global element starts[r]."""
    length = rows.shape[1]
    if length >= CHUNK:
        return add(
            [_long_run(row, identity, int(start)) for row, start in zip(rows, starts, strict=True)]
        )
    step = max(1, _BLOCK // length)
    weights = np.arange(1, 2 * length, 2, dtype=np.uint64)
    return add(
        [
            _short_runs(rows[at : at + step], identity, starts[at : at + step], weights)
            for at in range(0, len(rows), step)
        ]
    )


def _long_run(run: BitsArray, identity: int, start: int) -> int:
    """One contiguous run of any length: whole chunks as rows of their own, and the two ends."""
    head = min(-start % CHUNK, len(run))
    body = (len(run) - head) // CHUNK * CHUNK
    total = 0
    for at, length in ((0, head), (head + body, len(run) - head - body)):
        if length:
            ends = run[None, at : at + length]
            weights = np.arange(1, 2 * length, 2, dtype=np.uint64)
            total += _short_runs(ends, identity, np.full(1, start + at, np.uint64), weights)
    if body:
        rows = run[head : head + body].reshape(-1, CHUNK)
        total += _whole_chunks(rows, identity, (start + head) // CHUNK)
    return total & _MASK


def _whole_chunks(rows: BitsArray, identity: int, first: int) -> int:
    """Chunks first, first + 1, ... each a row of 32,768 elements."""
    weights = np.arange(1, 2 * CHUNK, 2, dtype=np.uint64)
    wide = np.empty(CHUNK, np.uint64)
    inner = np.empty(len(rows), np.uint64)
    for index, row in enumerate(rows):
        np.copyto(wide, row)
        inner[index] = np.dot(wide, weights)
    chunks = np.arange(first, first + len(rows), dtype=np.uint64)
    return int(np.add.reduce(inner * mix64(identity, chunks)))


def _short_runs(rows: BitsArray, identity: int, starts: UInt64Array, weights: UInt64Array) -> int:
    """Runs [R, L] with L below a chunk's length, so each lies in one chunk or in two.

    Within a chunk, sum b(2i + 1) with i = j + offset is sum b(2j + 1) + 2 * offset * sum b: weights
    depend on the run's own index j only, and the offset enters once per run. It may be negative.
    """
    length = rows.shape[1]
    first = starts // np.uint64(CHUNK)
    last = (starts + np.uint64(length - 1)) // np.uint64(CHUNK)
    wide = rows.astype(np.uint64)
    begins = np.arange(len(rows), dtype=np.int64) * length
    crossing = np.flatnonzero(first != last)
    until = last[crossing] * np.uint64(CHUNK) - starts[crossing]
    bounds = np.concatenate([begins, begins[crossing] + until.astype(np.int64)])
    chunks = np.concatenate([first, last[crossing]])
    origins = np.concatenate([starts, starts[crossing]])
    order = np.argsort(bounds, kind="stable")
    bounds, chunks, origins = bounds[order], chunks[order], origins[order]
    plain = np.add.reduceat(wide.reshape(-1), bounds)
    wide *= weights
    weighted = np.add.reduceat(wide.reshape(-1), bounds)
    offsets = origins - chunks * np.uint64(CHUNK)
    inner = weighted + np.uint64(2) * offsets * plain
    return int(np.add.reduce(inner * mix64(identity, chunks)))


def _device_blocks(num_runs: int, length: int) -> Iterator[tuple[slice, slice]]:
    step = max(1, _TORCH_BLOCK // length)
    for row in range(0, num_runs, step):
        for column in range(0, length, _TORCH_BLOCK):
            yield slice(row, row + step), slice(column, column + _TORCH_BLOCK)


def _device_sum(rows: torch.Tensor, identity: int, starts: UInt64Array) -> int:
    """The same sum where the values are, element by element in wrapping int64 arithmetic."""
    integer, _ = _UNSIGNED[rows.element_size()]
    first, device = int(starts[0]) // CHUNK, rows.device
    last = (int(starts[-1]) + rows.shape[1] - 1) // CHUNK
    mixes = mix64(identity, np.arange(first, last + 1, dtype=np.uint64)).view(np.int64)
    mix = torch.from_numpy(mixes).to(device)
    origins = torch.from_numpy(starts.view(np.int64)).to(device)
    mask = (1 << 8 * rows.element_size()) - 1
    total = 0
    for r, c in _device_blocks(rows.shape[0], rows.shape[1]):
        block = rows[r, c].contiguous().view(integer).to(torch.int64) & mask
        columns = torch.arange(c.start, c.start + block.shape[1], device=device)
        at = origins[r, None] + columns
        weighted = block * (2 * (at & (CHUNK - 1)) + 1) * mix[(at >> 15) - first]
        total += int(weighted.sum())
    return total & _MASK
