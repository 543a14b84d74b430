"""What needs Megatron or SGLang, where they are installed: else it says that they are not."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

import torch

from megarl.reshard.mesh import LearnerMesh
from megarl.weight_sync.control import SourceSpec
from megarl.weight_sync.transport.cuda_export import can_export
from tests.gpu.machine import Machine, Outcome
from tests.weight_sync import tiny


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
    if outcome.figures["sglang"] == "installed" and not machine.dry:
        outcome.figures["server"] = _publish_to_a_server(machine)
    return outcome


def _publish_to_a_server(machine: Machine) -> str:
    """Two publishes from here to a server of SGLang on the same GPU; both must be verified."""
    from megarl.weight_sync.session import WeightSync
    from tests.weight_sync.servers import RealServer, make_model

    spec = SourceSpec(tiny.SHAPE, LearnerMesh())
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        server = RealServer("gpu", model, 1, Path(folder) / "log", device="cuda")
        try:
            server.wait()
            learned = tiny.on_learner(spec, tiny.weights(tiny.SHAPE, 0))[0]
            parameters = {name: tensor.to(machine.device) for name, tensor in learned.items()}
            sync = WeightSync(f"gpuengine{os.getpid()}", spec, 0, parameters, "fp32")
            for version in (1, 2):
                new = tiny.on_learner(spec, tiny.weights(tiny.SHAPE, version))[0]
                for name, tensor in new.items():
                    parameters[name].copy_(tensor)
                report = sync.publish(version, [server.endpoint])
                assert report.servers[0].verified, report.servers[0].error
                assert server.version() == str(version)
            sync.close()
        finally:
            server.kill()
    return "verified twice"


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
