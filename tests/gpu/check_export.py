"""The probe: which memory of torch's can be exported, under each of its allocators.

python -m tests.gpu.check_export        says so of this process's allocator, as JSON
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch

from megarl.weight_sync.transport.cuda_driver import POOLED, VIRTUAL
from megarl.weight_sync.transport.cuda_export import can_export, can_stage
from megarl.weight_sync.transport.cuda_ipc import CudaArena
from tests.gpu.machine import Machine, Outcome
from tests.weight_sync.pretended_gpu import PretendedGpu

# Setting of PYTORCH_CUDA_ALLOC_CONF, and the reason that the probe is to give ("": none).
ALLOCATORS = {
    "": "",
    "expandable_segments:True": VIRTUAL,
    "backend:cudaMallocAsync": POOLED,
}


def say() -> None:
    machine = Machine()
    machine.prepare()
    buffer = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    view = buffer[1 << 20 : 2 << 20]  # inside an allocation, as parameters lie in Megatron's buffer
    memory = machine.memory
    answer = {
        "view": can_export(view, memory),
        "strided": can_export(buffer.view(1 << 14, 1 << 14).t(), memory),
        "stage": can_stage(memory),
    }
    if can_export(view, memory).ok:
        found = memory.allocation(view.data_ptr())
        assert found.base <= buffer.data_ptr() and found.num_bytes >= buffer.numel(), found
        CudaArena.direct(memory, f"gpucheck{os.getpid()}", 0, 0, {0: view}, "c" * 64).close()
    print(json.dumps(answer))


def run(machine: Machine) -> Outcome:
    outcome = Outcome()
    if machine.dry:
        memory = PretendedGpu()
        assert can_stage(memory).ok and can_export(torch.zeros(1), memory).why == VIRTUAL
        outcome.figures["asked"] = "a pretended GPU only"
        return outcome
    for setting, why in ALLOCATORS.items():
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting}
        if not setting:
            del environment["PYTORCH_CUDA_ALLOC_CONF"]
        command = [sys.executable, "-m", "tests.gpu.check_export"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{setting}: {done.stderr[-2000:]}"
        said = json.loads(done.stdout.splitlines()[-1])
        name = setting or "cudaMalloc"
        outcome.figures[name] = said["view"][1] or "can be exported"
        if said["view"] != [not why, why]:
            outcome.missed.append(f"{name}: {said['view']}, wanted {[not why, why]}")
        assert said["stage"] == [True, ""], f"{name}: staging arenas cannot be exported: {said}"
        assert "not contiguous" in said["strided"][1]
    return outcome


if __name__ == "__main__":
    say()
