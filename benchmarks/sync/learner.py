"""Learner ranks that hold live tensors and publish them: real collectives, the product's own code.

`python -m benchmarks.sync.learner CASE CACHE STAGING RANK PORT`; each line it reads is an order,
each answer a line of JSON. There is no Megatron: an optimizer step is a pass that writes all
weights.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.sync.cases import CASES, Case, Tensors, on_rank, whole_tensors
from megarl.launch import cleanup
from megarl.types import ServerEndpoint
from megarl.weight_sync.full import FullPolicy
from megarl.weight_sync.transport.in_place import live_memory
from megarl.weight_sync.transport.shared import Arena

ROOT = Path(__file__).parents[2]
DEADLINE_S = 300.0
END_S = 20.0
STAGINGS = ("in_place", "staged")
"""Weights in shared memory that servers read, or in private memory that is copied there first."""


def run_id(parent: int) -> str:
    """What the shared memory of a benchmark's ranks is named after."""
    return f"bench{parent}"


class Learner:
    """The processes, from the benchmark's side."""

    def __init__(self, case: Case, staging: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        told = (case.name, str(case.model.parent), staging)
        self._ranks = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, *told, str(rank), str(port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                text=True,
            )
            for rank in range(case.mesh.size)
        ]

    def publish(
        self, version: int, servers: Sequence[ServerEndpoint], **more: object
    ) -> list[dict[str, Any]]:
        """Every rank's answer to one step and publish. Raises RuntimeError where one ended."""
        order = {"version": version, "servers": [asdict(server) for server in servers], **more}
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps(order) + "\n")
            rank.stdin.flush()
        lines = [rank.stdout.readline() for rank in self._ranks]  # type: ignore[union-attr]
        if not all(lines):
            raise RuntimeError(f"a learner rank ended while it published {version}; see above")
        return [json.loads(line) for line in lines]

    def gather(self) -> float:
        """Seconds until rank 0 has had every whole tensor, as a sender of whole tensors must."""
        return max(answer["took_s"] for answer in self.publish(0, (), gather=True))

    def __enter__(self) -> Learner:
        return self

    def __exit__(self, *error: object) -> None:
        """End the ranks."""
        for rank in self._ranks:
            if rank.stdin is not None:
                rank.stdin.close()
        for rank in self._ranks:
            try:
                rank.wait(END_S)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()
        cleanup.sweep_run(run_id(os.getpid()))


def main(name: str, cache: str, staging: str, rank: int, port: int) -> None:
    """Serve orders until the input ends."""
    import torch.distributed as dist

    from benchmarks.sync.counting import LOADER, counted, counted_requests
    from megarl.weight_sync import exchange
    from megarl.weight_sync.session import WeightSync

    case = CASES[name](Path(cache))
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=case.mesh.size
    )
    name_of_run = run_id(os.getppid())
    weights = on_rank(case, rank, whole_tensors(case))
    memory = None
    if staging == "in_place":
        memory = moved(name_of_run, rank, weights)
    sync = WeightSync(
        name_of_run,
        case.source,
        rank,
        weights,
        "fp32",
        group=dist.group.WORLD,
        cpu_servers=True,
        deadline_s=DEADLINE_S,
        memory=memory,
    )

    def publish(order: dict[str, Any]) -> dict[str, Any]:
        servers = [ServerEndpoint(**server) for server in order["servers"]]
        start = time.perf_counter()
        report = sync.publish(order["version"], servers)
        return {"start": start, "end": time.perf_counter(), "report": asdict(report)}

    policy = FullPolicy(
        case.shape, sync.sender.layout, rank, weights, "fp32", group=dist.group.WORLD
    )
    usual = exchange.LOAD_FORMAT
    for line in sys.stdin:
        order = json.loads(line)
        for tensor in weights.values():  # the optimizer step
            tensor.mul_(1.0 + 2.0**-12)
        dist.barrier()
        if order.get("count"):
            exchange.LOAD_FORMAT = LOADER
            with counted() as calls, counted_requests() as requests:
                answer = publish(order)
            answer |= {"num_calls": calls.num_calls, "routes": requests}
            exchange.LOAD_FORMAT = usual
        elif order.get("gather"):
            answer = _gathered(policy)
        else:
            answer = publish(order)
        print(json.dumps(answer), flush=True)
    sync.close()
    if memory is not None:
        memory.close()
    dist.destroy_process_group()


def _gathered(policy: FullPolicy) -> dict[str, Any]:
    start = time.perf_counter()
    for _ in policy.stream():
        pass
    return {"took_s": time.perf_counter() - start}


def moved(run_id: str, rank: int, weights: Tensors) -> Arena:
    """Put a rank's weights into shared memory, one after the other, as Megatron's buffer is."""
    sizes = [(tensor.nbytes + 4095) // 4096 * 4096 for tensor in weights.values()]
    memory = live_memory(run_id, rank, sum(sizes))
    starts = itertools.accumulate(sizes, initial=0)
    for (name, tensor), start in zip(list(weights.items()), starts, strict=False):
        weights[name] = memory.view(start, tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        weights[name].copy_(tensor)
    return memory


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
