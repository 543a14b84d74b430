"""The ranks of the learner: torch.distributed, Megatron's parallel state, devices and seeds.

Owns how a process becomes rank (t, c, d, p) of TP x CP x DP x PP, on which the experts have axes of
their own (EP, ETP). Knows nothing of models, losses or batches.
Megatron is imported inside functions only, after its CPU substitution is in place.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megarl.compat import gloo_device, megatron_cpu
from megarl.errors import LaunchError
from megarl.reshard.mesh import LearnerMesh

ProcessGroup = Any  # torch.distributed.ProcessGroup


@dataclass(frozen=True, slots=True)
class Ranks:
    """Where this process stands in the mesh, and the groups it talks through."""

    mesh: LearnerMesh
    device: torch.device
    rank: int
    tp_rank: int
    cp_rank: int
    dp_rank: int
    pp_rank: int
    tp_group: ProcessGroup
    cp_group: ProcessGroup

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds tokens, in its first model chunk."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes logits, log-probs and the loss, in its last model chunk."""
        return self.pp_rank == self.mesh.pp - 1

    @property
    def reports(self) -> bool:
        """Whether this rank's numbers count: one tensor and context rank of the last stage.

        They are those of all tokens of its data-parallel rank.
        """
        return self.is_last_stage and self.tp_rank == 0 and self.cp_rank == 0

    @property
    def replica(self) -> int:
        """Which of the ranks this is that hold the same dense weights."""
        return self.dp_rank * self.mesh.cp + self.cp_rank


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """The device of this process; `wanted` is `launch.device`.

    Raises LaunchError where CUDA is wanted and absent, or where the CPU is wanted beside visible
    GPUs (Megatron would put its buffers there).
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise LaunchError("launch.device is cuda, but torch sees none; use auto or cpu")
    if wanted == "cpu" and torch.cuda.is_available():
        raise LaunchError(
            "launch.device is cpu, but torch sees CUDA devices; hide them from the learner with "
            "CUDA_VISIBLE_DEVICES=''"
        )
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise LaunchError(
            f"local rank {local_rank} has no GPU, this node shows {torch.cuda.device_count()}; "
            "start at most one learner process per GPU"
        )
    return torch.device("cuda", local_rank)


def start(
    mesh: LearnerMesh, device: str = "auto", seed: int = 0, timeout_s: float = 1800.0
) -> Ranks:
    """Join torch.distributed, from torchrun's environment unless joined already; build the mesh.

    Collective over all ranks. `timeout_s` bounds every collective. Calling it again with another
    mesh of the same size replaces the mesh. Raises LaunchError where the number of processes is not
    the mesh's.
    """
    megatron_cpu.install()
    gloo_device.install()
    chosen = choose_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    world_size = dist.get_world_size()
    if world_size != mesh.size:
        raise LaunchError(
            f"the learner has {world_size} processes, but tp={mesh.tp} x pp={mesh.pp} x "
            f"cp={mesh.cp} x dp={mesh.dp} needs {mesh.size}; set placement.learner_gpus to a "
            "multiple of tp x pp x cp"
        )
    from megatron.core import parallel_state, tensor_parallel

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=mesh.tp,
        pipeline_model_parallel_size=mesh.pp,
        virtual_pipeline_model_parallel_size=mesh.vpp if mesh.vpp > 1 else None,
        context_parallel_size=mesh.cp,
        expert_model_parallel_size=mesh.ep,
        expert_tensor_parallel_size=mesh.etp,
        distributed_timeout_minutes=max(1, int(timeout_s // 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    torch.manual_seed(seed)
    return Ranks(
        mesh=mesh,
        device=chosen,
        rank=dist.get_rank(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        cp_group=parallel_state.get_context_parallel_group(),
    )


def stop() -> None:
    """Leave the mesh and torch.distributed. Collective over all ranks."""
    if not dist.is_initialized():
        return
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
