"""SGLang's own two ways to take new weights: whole tensors over HTTP, and a broadcast over Gloo.

Both get whole tensors by their Hugging Face names, as their senders have them after gathering all
shards, which is timed apart from these (`Learner.gather`). Neither verifies anything.
"""

from __future__ import annotations

import base64
import multiprocessing
import pickle
import socket
import time
from multiprocessing.connection import Connection

from benchmarks.sync.cases import Case, stored_tensors
from benchmarks.sync.server import Server

GROUP = "stock"
SESSION = {"selector": "target"}


def by_tensor(server: Server, case: Case, num_syncs: int) -> list[float]:
    """Seconds of each update_weights_from_tensor of everything, from begin to end of a session."""
    tensors = list(stored_tensors(case).items())
    took = []
    for _ in range(num_syncs):
        start = time.perf_counter()
        server.post("/begin_weight_update", SESSION)
        payload = base64.b64encode(pickle.dumps(tensors)).decode("ascii")
        body = {"serialized_named_tensors": [payload] * case.tp, **SESSION}
        server.post("/update_weights_from_tensor", body)
        server.post("/end_weight_update", {})
        took.append(time.perf_counter() - start)
    return took


def by_broadcast(server: Server, case: Case, num_syncs: int) -> list[float]:
    """Seconds of each update_weights_from_distributed of everything, over Gloo, likewise.

    The group is made before and not counted. The sender is a process of its own, as a learner is.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    sender = context.Process(target=_broadcast, args=(theirs, case, port), daemon=True)
    sender.start()
    tensors = ours.recv()
    group = {"group_name": GROUP, "backend": "gloo", "world_size": 1 + case.tp, "rank_offset": 1}
    ours.send("join")
    server.post(
        "/init_weights_update_group",
        {"master_address": "127.0.0.1", "master_port": port, **group},
    )
    assert ours.recv() == "joined"
    took = []
    for _ in range(num_syncs):
        start = time.perf_counter()
        server.post("/begin_weight_update", SESSION)
        ours.send("broadcast")
        server.post("/update_weights_from_distributed", {**tensors, "group_name": GROUP, **SESSION})
        server.post("/end_weight_update", {})
        took.append(time.perf_counter() - start)
        assert ours.recv() == "sent"
    server.post("/destroy_weights_update_group", {"group_name": GROUP})
    ours.send("end")
    sender.join(60)
    return took


def _broadcast(pipe: Connection, case: Case, port: int) -> None:
    """The sending process: rank 0 of the group, made by SGLang's own function."""
    import torch.distributed as dist

    from megarl.compat import sglang_cpu

    sglang_cpu.install()
    from sglang.srt.utils.common import init_custom_process_group

    tensors = stored_tensors(case)
    pipe.send(
        {
            "names": list(tensors),
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
            "shapes": [list(t.shape) for t in tensors.values()],
        }
    )
    group = None
    while (order := pipe.recv()) != "end":
        if order == "join":
            group = init_custom_process_group(
                backend="gloo",
                init_method=f"tcp://127.0.0.1:{port}",
                world_size=1 + case.tp,
                rank=0,
                group_name=GROUP,
            )
            pipe.send("joined")
        else:
            works = [dist.broadcast(t, 0, group=group, async_op=True) for t in tensors.values()]
            for work in works:
                work.wait()
            pipe.send("sent")
