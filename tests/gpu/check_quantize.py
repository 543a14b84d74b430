"""Float8 in blocks: the GPU's codes and scales are the CPU's bit for bit, and how fast."""

from __future__ import annotations

import torch

from megarl.float8 import BlockScaling, quantize
from tests.gpu.machine import Machine, Outcome

SHAPES = ((4, 256, 384), (576, 7168), (200, 300), (1, 128))
ROWS, COLUMNS = 4096, 14_336


def _weight(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Numbers of all sizes, with blocks of zeros and ties between two codes."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(shape, generator=generator)
    weight *= torch.exp2(torch.randint(-40, 8, shape, generator=generator).float())
    weight[..., :128, :64] = torch.arange(64).float() * 0.5
    weight[..., -1, -1] = 0.0
    return weight.to(dtype)


def run(machine: Machine) -> Outcome:
    outcome = Outcome()
    for dtype in (torch.float32, torch.bfloat16):
        for scale in ("float32", "power_of_two"):
            for shape in SHAPES:
                scaling = BlockScaling(128, 128, scale)
                weight = _weight(shape, dtype)
                wanted, wanted_scales = quantize(weight, scaling)
                found, scales = quantize(weight.to(machine.device), scaling)
                where = f"{dtype} {scale} {shape}"
                assert torch.equal(scales.cpu(), wanted_scales), f"{where}: scales"
                bits = found.cpu().view(torch.uint8)
                assert torch.equal(bits, wanted.view(torch.uint8)), f"{where}: codes"
    outcome.figures["equal_to_cpu"] = True
    if not machine.dry:
        _measure(machine, outcome)
    return outcome


def _measure(machine: Machine, outcome: Outcome) -> None:
    weight = torch.randn(ROWS, COLUMNS, device=machine.device, dtype=torch.bfloat16)
    took = machine.seconds(lambda: quantize(weight, BlockScaling()))
    outcome.figures["quantized_gb_s"] = round(weight.numel() * 2 / took / 1e9)
    outcome.figures["quantize_of_copy"] = round(took / machine.copy_seconds(weight.numel() * 2), 1)
