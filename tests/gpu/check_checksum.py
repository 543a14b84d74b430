"""The checksum's kernel: equal to the CPU's bit for bit, and how fast."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from megarl.weight_sync import checksum_triton
from megarl.weight_sync.checksum import box_checksum
from megarl.weight_sync.checksum_triton import BoxValues
from tests.gpu.machine import Machine, Outcome

HBM_BYTES_S = {"H100": 3.35e12, "H200": 4.8e12}  # by the vendor's data sheets
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}
Box = tuple[tuple[int, int], ...]
BOXES: list[tuple[tuple[int, ...], Box]] = [
    ((200_003,), ((0, 200_003),)),
    ((200_003,), ((7, 150_001),)),
    ((96, 7168), ((0, 96), (0, 7168))),
    ((96, 7168), ((0, 96), (1536, 3072))),
    ((301, 333), ((11, 300), (5, 130))),
    ((5, 80, 129), ((1, 5), (3, 80), (1, 129))),
    ((300, 40_000), ((1, 4), (3, 39_000))),
    ((70_000, 1), ((5, 69_999), (0, 1))),
]


def _bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Every bit pattern, also those of NaN."""
    size = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def run(machine: Machine) -> Outcome:
    outcome = Outcome()
    is_there = checksum_triton.is_available()
    if machine.dry and (not is_there or os.environ.get("TRITON_INTERPRET") != "1"):
        outcome.figures["kernel"] = "Triton is not installed"
        return outcome
    if not is_there:
        outcome.missed.append("Triton is not installed: checksums are torch's")
    for name, dtype in DTYPES.items():
        # One kernel for each kind of tile and type: all kinds for one type, some for others.
        _check_equal(machine, dtype, BOXES if name == "bf16" else BOXES[1:7:2])
        outcome.figures[f"{name}_equal"] = True
    if not machine.dry:
        _measure(machine, outcome)
    return outcome


def _check_equal(
    machine: Machine, dtype: torch.dtype, boxes: Sequence[tuple[tuple[int, ...], Box]]
) -> None:
    here = [
        BoxValues(_bits(shape, dtype, i)[tuple(slice(*side) for side in box)], f"w{i}", shape, box)
        for i, (shape, box) in enumerate(boxes)
    ]
    there = []
    for each in here:
        whole = _bits(each.shape, dtype, len(there)).to(machine.device)
        view = whole[tuple(slice(*side) for side in each.box)]
        there.append(BoxValues(view, each.name, each.shape, each.box))
    wanted = [box_checksum(each.values, each.name, each.shape, each.box) for each in here]
    found = checksum_triton.sums(there) if machine.dry else checksum_triton.box_checksums(there)
    assert found == wanted, f"{dtype}: {list(zip(found, wanted, strict=True))}"
    one_by_one = [box_checksum(t.values, t.name, t.shape, t.box) for t in there]
    assert one_by_one == wanted, f"{dtype}: torch's form on {machine.device}"


def _measure(machine: Machine, outcome: Outcome) -> None:
    rows, columns = 4096, 14_336
    number = max(1, int(min(machine.gigabytes, 8.0) * 1e9 / (rows * columns * 2)))
    tensors = [
        torch.randn(rows, columns, device=machine.device, dtype=torch.bfloat16)
        for _ in range(number)
    ]
    whole = [
        BoxValues(t, f"w{i}", (rows, columns), ((0, rows), (0, columns)))
        for i, t in enumerate(tensors)
    ]
    eighth = columns // 8
    sliced = [
        BoxValues(
            b.values[:, eighth : 2 * eighth], b.name, b.shape, ((0, rows), (eighth, 2 * eighth))
        )
        for b in whole
    ]
    num_bytes = number * rows * columns * 2
    both = 2 * num_bytes / machine.copy_seconds(num_bytes)  # read and written
    outcome.figures["copy_gb_s"] = round(both / 1e9)
    name = torch.cuda.get_device_properties(0).name
    for kind, boxes, size in (("whole", whole, num_bytes), ("slices", sliced, num_bytes / 8)):
        took = machine.seconds(lambda boxes=boxes: checksum_triton.box_checksums(boxes))
        outcome.figures[f"{kind}_gb_s"] = round(size / took / 1e9)
        outcome.want(f"{kind}_of_copy", size / took / both, low=0.5 if kind == "whole" else 0.0)
        for card, peak in HBM_BYTES_S.items():
            if card in name:
                outcome.figures[f"{kind}_of_{card}"] = round(size / took / peak, 3)
    first = whole[0]
    took = machine.seconds(
        lambda: box_checksum(first.values, first.name, first.shape, first.box), 3
    )
    outcome.figures["torch_form_gb_s"] = round(rows * columns * 2 / took / 1e9)
