"""Learner ranks that bring the policy together, or write it to disk, without Megatron or SGLang."""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.actor.parameters import parameter_table
from megarl.actor.shape import ModelShape
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh
from megarl.reshard.placement import Device
from megarl.weight_sync.control import WIRE_DTYPES, SourceSpec
from megarl.weight_sync.disk import CheckpointWriter
from megarl.weight_sync.full import FullPolicy
from tests.weight_sync import tiny
from tests.weight_sync.forked import Ranks


@dataclass(frozen=True)
class Policy:
    """Whose weights are brought together, and where they are."""

    shape: ModelShape
    mesh: LearnerMesh
    seed: int
    dtype: str = "fp32"


def stored(shape: ModelShape, seed: int, dtype: str) -> dict[str, torch.Tensor]:
    """The checkpoint of `seed` under Hugging Face's names, by plain indexing."""
    tensors = tiny.weights(shape, seed)
    found = {}
    for parameter in parameter_table(shape):
        kept = torch.float32 if parameter.precision == "float32" else WIRE_DTYPES[dtype]
        whole = tensors[parameter.name].to(kept)
        for number, name in enumerate(parameter.stored_names()):
            found[name] = whole[number] if parameter.stacked else whole
    return found


def start(world: int) -> Ranks:
    """Learner ranks that serve orders: (name of a function here, policy, arguments)."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return Ranks(_serve, [(rank, world, port) for rank in range(world)])


def _serve(pipe: Connection, rank: int, world: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    while True:
        name, policy, arguments = pipe.recv()
        work: Callable[..., Any] = {"gather": _gather, "write": _write}[name]
        try:
            pipe.send(work(rank, policy, *arguments))
        except Exception as error:  # noqa: BLE001 - told to the test
            pipe.send(f"{type(error).__name__}: {error}")


def _parameters(rank: int, policy: Policy) -> dict[str, torch.Tensor]:
    spec = SourceSpec(policy.shape, policy.mesh)
    return tiny.on_learner(spec, tiny.weights(policy.shape, policy.seed))[rank]


def _gather(
    rank: int, policy: Policy, bucket_bytes: int, broken_rank: int = -1, most: int = 1 << 30
) -> dict[str, Any]:
    """What came to rank 0, and what this rank sent; `most` buckets are wanted."""
    parameters = _parameters(rank, policy)
    layout = megatron_layout(policy.shape, policy.mesh)
    devices = [Device(0, i) for i in range(policy.mesh.size)]
    full = FullPolicy(
        policy.shape, layout, rank, parameters, policy.dtype,
        group=dist.group.WORLD, devices=devices, bucket_bytes=bucket_bytes,
    )  # fmt: skip
    if rank == broken_rank:
        parameters.clear()
    wanted = stored(policy.shape, policy.seed, policy.dtype)
    sent, seen, wrong = 0, [], []
    earlier: list[weakref.ref[torch.Tensor]] = []
    send = dist.send

    def counted(tensor: torch.Tensor, **to: Any) -> None:
        nonlocal sent
        sent += tensor.numel() * tensor.itemsize
        send(tensor, **to)

    dist.send = counted
    try:
        for bucket, data in full.stream(lambda: len(seen) < most):
            seen.append([tensor.name for tensor in bucket.tensors])
            if data is not None:
                wrong += [f"{ref} is held" for ref in earlier if ref() is not None]
                earlier.append(weakref.ref(data))
                for name, view in bucket.views(data).items():
                    if view.dtype != wanted[name].dtype or not torch.equal(view, wanted[name]):
                        wrong.append(name)
            del data
    finally:
        dist.send = send
    return {"sent": sent, "seen": seen, "wrong": wrong}


def _write(
    rank: int, policy: Policy, folder: Path, model: Path, shard_bytes: int, broken_rank: int = -1
) -> bool:
    parameters = _parameters(rank, policy)
    layout = megatron_layout(policy.shape, policy.mesh)
    writer = CheckpointWriter(
        policy.shape, layout, rank, parameters, policy.dtype, model, dist.group.WORLD, shard_bytes
    )
    if rank == broken_rank:
        parameters.clear()
    writer.write(folder)
    return folder.is_dir()
