"""The checksum's kernel, in Triton. Imported only where Triton is really installed.

Owns the arithmetic of one tile. What tiles there are, and why, is `checksum_triton`'s.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A tile is ROWS rows of up to COLUMNS * UNROLL * LOOPS <= CHUNK columns, so that each of its rows
# lies in one chunk or in two. G is an element's global index, I its index within its chunk.


@triton.jit
def mix64(identity, chunk):
    """`checksum.mix64` of one chunk, in uint64."""
    z = chunk * 0x9E3779B97F4A7C15 + identity
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return (z ^ (z >> 31)) | 1


@triton.jit
def bits_at(pointers, at, is_row, width, ITEMSIZE: tl.constexpr, IS_FULL: tl.constexpr):
    """The bits of the elements at columns `at`, in unsigned integers that hold sums of them.

    There are few loops: sums of 2-byte elements over them fit into 4 bytes.
    """
    if IS_FULL:
        values = tl.load(pointers + at[None, :])
    else:
        is_there = is_row[:, None] & (at < width)[None, :]
        values = tl.load(pointers + at[None, :], mask=is_there, other=0)
    if ITEMSIZE > 2:
        return values.to(tl.uint32).to(tl.uint64)
    else:
        return (values.to(tl.int32) & ((1 << 8 * ITEMSIZE) - 1)).to(tl.uint32)


@triton.jit
def sum_in_one_chunk(
    pointers,
    is_row,
    width,
    inside,
    ITEMSIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
    LOOPS: tl.constexpr,
    IS_FULL: tl.constexpr,
):
    """For each row the sum of b (2I + 1), I = inside + step * COLUMNS + column.

    From two sums over steps, without a product for each element: `plain` of b, and `ladder` of
    (LOOPS * UNROLL - step) b.
    """
    columns = tl.arange(0, COLUMNS)
    plain = tl.zeros((ROWS, COLUMNS), tl.uint64 if ITEMSIZE > 2 else tl.uint32)
    ladder = tl.zeros((ROWS, COLUMNS), tl.uint64 if ITEMSIZE > 2 else tl.uint32)
    for loop in range(LOOPS):
        for unrolled in tl.static_range(UNROLL):
            at = (loop * UNROLL + unrolled) * COLUMNS + columns
            plain += bits_at(pointers, at, is_row, width, ITEMSIZE, IS_FULL)
            ladder += plain
    index = inside[:, None] + (columns + LOOPS * UNROLL * COLUMNS)[None, :]
    weight = (2 * index + 1).to(tl.uint64)
    return tl.sum(plain.to(tl.uint64) * weight - ladder.to(tl.uint64) * (2 * COLUMNS), 1)


@triton.jit
def sums_in_two_chunks(
    pointers,
    is_row,
    width,
    inside,
    ITEMSIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
    LOOPS: tl.constexpr,
    IS_FULL: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """For each row the sum of b (2I + 1), and the part of it that lies in the second chunk."""
    columns = tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.uint64)
    beyond = tl.zeros((ROWS, COLUMNS), tl.uint64)
    for loop in range(LOOPS):
        for unrolled in tl.static_range(UNROLL):
            at = (loop * UNROLL + unrolled) * COLUMNS + columns
            bits = bits_at(pointers, at, is_row, width, ITEMSIZE, IS_FULL)
            index = inside[:, None] + at[None, :]
            weight = (2 * (index & (CHUNK - 1)) + 1).to(tl.uint32).to(bits.dtype)
            product = (bits * weight).to(tl.uint64)  # of 2-byte elements below 2^32
            total += product
            beyond += tl.where(index >= CHUNK, product, 0)
    return tl.sum(total, 1), tl.sum(beyond, 1)


@triton.jit
def sum_tiles(
    tiles,  # int64 [num_tiles, 4]: part, first row, first column, column after the last
    parts,  # int64 [num_parts, 8]: offset, rows, row stride, G of first, of a row, id, sum, unused
    anchor,  # elements as integers; offsets count from here, in elements
    sums,  # int64 [num_sums]
    ITEMSIZE: tl.constexpr,  # bytes of an element: 1, 2 or 4
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
    LOOPS: tl.constexpr,
    IS_FULL: tl.constexpr,  # whether all rows are there, and all columns of every loop
    CROSSES: tl.constexpr,  # whether a row of a tile may lie in two chunks
    DIVISOR: tl.constexpr,  # what columns, offsets and row strides are multiples of
    CHUNK: tl.constexpr,
):
    """Add the checksum of each program's tile to its part's sum."""
    tile = tiles + tl.program_id(0) * 4
    part = parts + tl.load(tile) * 8
    row = tl.load(tile + 1) + tl.arange(0, ROWS)
    column = tl.multiple_of(tl.load(tile + 2), DIVISOR)
    width = tl.multiple_of((tl.load(tile + 3) - column).to(tl.int32), DIVISOR)
    offset = tl.multiple_of(tl.load(part), DIVISOR)
    stride = tl.multiple_of(tl.load(part + 2), DIVISOR)
    first = tl.load(part + 3) + column + row * tl.load(part + 4)  # G of each row's first column
    inside = (first & (CHUNK - 1)).to(tl.int32)  # its I
    is_row = row < tl.load(part + 1)
    pointers = anchor + (offset + column) + (row * stride)[:, None]
    identity = tl.load(part + 5).to(tl.uint64)
    chunk = (first // CHUNK).to(tl.uint64)
    if CROSSES:
        total, beyond = sums_in_two_chunks(
            pointers, is_row, width, inside,
            ITEMSIZE, ROWS, COLUMNS, UNROLL, LOOPS, IS_FULL, CHUNK,
        )  # fmt: skip
        result = (total - beyond) * mix64(identity, chunk)
        result += beyond * mix64(identity, chunk + 1)
    else:
        total = sum_in_one_chunk(
            pointers, is_row, width, inside, ITEMSIZE, ROWS, COLUMNS, UNROLL, LOOPS, IS_FULL
        )
        result = total * mix64(identity, chunk)
    tl.atomic_add(sums + tl.load(part + 6), tl.sum(result, 0).to(tl.int64))
