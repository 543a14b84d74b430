"""What needs Megatron or SGLang, where they are installed: else it says that they are not."""

from __future__ import annotations

import importlib.util

import torch

from megarl.weight_sync.transport.cuda_export import can_export
from tests.gpu.machine import Machine, Outcome


def run(machine: Machine) -> Outcome:
    outcome = Outcome()
    for engine in ("megatron.core", "sglang"):
        try:
            is_there = importlib.util.find_spec(engine) is not None
        except ModuleNotFoundError:
            is_there = False
        outcome.figures[engine] = "installed" if is_there else "not installed: nothing was shown"
    if outcome.figures["megatron.core"] == "installed" and not machine.dry:
        outcome.figures["parameter_buffer"] = _parameter_buffer(machine)
    return outcome


def _parameter_buffer(machine: Machine) -> str:
    """Whether Megatron's contiguous buffer of bf16 parameters can be read in place."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    layer = torch.nn.Linear(4096, 4096, dtype=torch.bfloat16, device=machine.device)
    model = DistributedDataParallel(
        TransformerConfig(num_layers=1, hidden_size=4096, num_attention_heads=1),
        DistributedDataParallelConfig(use_distributed_optimizer=True),
        layer,
    )
    verdict = can_export(model.buffers[0].param_data, machine.memory)
    dist.destroy_process_group()
    return "can be exported" if verdict.ok else verdict.why
