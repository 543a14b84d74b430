"""One rank of a stand-in learner: holds Megatron-shaped tensors, publishes when told to.

`python -m tests.weight_sync.learner_ranks RANK WORLD PORT`; each line of its input is a JSON
object {mesh, seed, version, servers, ...}, each answer a line of JSON. All ranks are on a node
called "a". Real collectives, no Megatron.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from megarl.types import ServerEndpoint

ROOT = Path(__file__).parents[2]


class LearnerRanks:
    """The processes, from the side of the test."""

    def __init__(self, world: int, port: int) -> None:
        self._ranks = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, str(rank), str(world), str(port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                text=True,
            )
            for rank in range(world)
        ]

    def publish(
        self,
        mesh: tuple[int, int, int] | dict[str, int],
        seed: int,
        version: int,
        servers: list[ServerEndpoint],
        **more: object,
    ) -> list[dict[str, Any]]:
        """Every rank's answer to one publish of the weights of `seed`."""
        told = [dataclasses.asdict(server) for server in servers]
        order = {"mesh": mesh, "seed": seed, "version": version, "servers": told, **more}
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps(order) + "\n")
            rank.stdin.flush()
        return [json.loads(rank.stdout.readline()) for rank in self._ranks]  # type: ignore[union-attr]

    def close(self) -> None:
        for rank in self._ranks:
            rank.stdin.close()  # type: ignore[union-attr]
        for rank in self._ranks:
            assert rank.wait(30) == 0


def main(rank: int, world: int, port: int) -> None:
    """Serve orders until the input ends."""
    import torch.distributed as dist

    from megarl.reshard.engine_tensors import learner_buffers
    from megarl.reshard.mesh import LearnerMesh
    from megarl.weight_sync import exchange
    from megarl.weight_sync.control import LOAD_FORMAT, WIRE_DTYPES, SourceSpec
    from megarl.weight_sync.places import Place
    from megarl.weight_sync.session import WeightSync
    from tests.weight_sync import tiny
    from tests.weight_sync.family_models import SHAPES

    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    for line in sys.stdin:
        order = json.loads(line)
        sizes = order["mesh"]
        mesh = LearnerMesh(**sizes) if isinstance(sizes, dict) else LearnerMesh(*sizes)
        shape = SHAPES[order.get("model", "dense")]
        spec = SourceSpec(shape, mesh, forms=tuple(order.get("forms", ("te", "sequential"))))
        parameters = tiny.on_learner(spec, tiny.weights(shape, order["seed"]))[rank]
        dtype = order.get("dtype", "fp32")
        for name in parameters.keys() - learner_buffers(shape, spec.layout(), rank):
            parameters[name] = parameters[name].to(WIRE_DTYPES[dtype])
        exchange.LOAD_FORMAT = order.get("load_format", LOAD_FORMAT)  # type: ignore[misc]
        run_id = f"ranks{os.getppid()}_{order['version']}"
        try:
            sync = WeightSync(
                run_id,
                spec,
                rank,
                parameters,
                dtype,
                group=dist.group.WORLD,
                cpu_servers=True,
                deadline_s=order.get("deadline_s", 60.0),
                place=Place("a", rank),
                bucket_bytes=order.get("bucket_bytes", 64 << 20),
            )
            if order.get("broken_rank") == rank:
                del parameters["decoder.layers.0.mlp.linear_fc2.weight"]
            report = sync.publish(
                order["version"], [ServerEndpoint(**server) for server in order["servers"]]
            )
            sync.close()
            answer: object = dataclasses.asdict(report)
        except Exception as error:  # noqa: BLE001 - told to the test
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:4]))
