"""A server of full tensors, without SGLang: it loads a policy by SGLang's own calls.

Its routes keep SGLang's rules of a session, and its one rank of a broadcast joins by torch's own
way of making a group beside the default one, as SGLang does. Log-probs depend on every byte loaded.
"""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d as c10d

from megarl.types import ServerEndpoint
from tests.weight_sync import tiny
from tests.weight_sync.web import Web

INFO = Path(__file__).parents[1] / "config" / "server_info.json"
BUCKETS = "flattened_bucket"
FINE = (200, "{}")

Answer = tuple[int, str]
Body = dict[str, Any]


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> int:
    """64 bits that depend on every byte, type, shape and name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest()[:8], "little")


class LoadingServer:
    """One server of `tp` ranks, which must all be sent the same; `info` is what it says of itself.

    `refused` are routes that answer 400, as long as they are in it.
    """

    def __init__(self, name: str, tp: int = 1, **info: object) -> None:
        self.info = {**json.loads(INFO.read_text()), "tp_size": tp, **info}
        self.tensors: dict[str, torch.Tensor] = {}
        self.label, self.is_paused, self.is_open = "default", False, False
        self.flushes: list[bool] = []  # of each update
        self.refused: set[str] = set()
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.web = Web()
        self.endpoint = ServerEndpoint(name, self.web.endpoint.url, tp, 0)
        for route, work in {
            "/server_info": lambda body: (200, json.dumps(self.info)),
            "/pause_generation": self._pause,
            "/continue_generation": self._resume,
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
            "/update_weights_from_tensor": self._from_tensor,
            "/init_weights_update_group": self._join,
            "/update_weights_from_distributed": self._from_distributed,
            "/update_weights_from_disk": self._from_disk,
            "/update_weight_version": self._name,
            "/generate": self._generate,
        }.items():
            self.web.answers[route] = lambda body, route=route, work=work: (  # type: ignore[misc]
                (400, "refused") if route in self.refused else work(body)
            )

    def close(self) -> None:
        """End it, and leave its groups."""
        self.web.close()
        for group in self.groups.values():
            dist.destroy_process_group(group)

    def holds(self, wanted: Mapping[str, torch.Tensor]) -> bool:
        """Whether it has loaded exactly these, bit for bit."""
        return fingerprint(self.tensors) == fingerprint(wanted)

    def _pause(self, body: Body) -> Answer:
        self.is_paused = True
        return FINE

    def _resume(self, body: Body) -> Answer:
        self.is_paused = False
        return FINE

    def _begin(self, body: Body) -> Answer:
        if self.is_open or body["selector"] != "target":
            return 400, "a weight-update session is already open"
        self.is_open = True
        return FINE

    def _end(self, body: Body) -> Answer:
        if not self.is_open:
            return 400, "no weight-update session is open"
        self.is_open = False
        return FINE

    def _from_tensor(self, body: Body) -> Answer:
        payloads = body["serialized_named_tensors"]
        if not self._may_load(body) or len(payloads) != self.endpoint.tp:
            return 400, "no weight-update session is open, or not one payload for each rank"
        for payload in payloads:
            sent = pickle.loads(base64.b64decode(payload))
            for meta in sent["metadata"]:
                part = sent["flattened_tensor"][meta.start_idx : meta.end_idx]
                self.tensors[meta.name] = part.view(meta.dtype).view(meta.shape).clone()
        return FINE

    def _join(self, body: Body) -> Answer:
        assert body["world_size"] == body["rank_offset"] + self.endpoint.tp == 2
        address = body["master_address"], body["master_port"]
        name = body["group_name"]
        store = dist.TCPStore(*address, is_master=False, wait_for_workers=False)
        backend, place = dist.Backend(body["backend"]), dist.PrefixStore(name, store)
        group, _ = c10d._new_process_group_helper(
            2, 1, [], backend, place, group_name=name, timeout=timedelta(seconds=60)
        )
        c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
        self.groups[name] = group
        return FINE

    def _from_distributed(self, body: Body) -> Answer:
        if not self._may_load(body):
            return 400, "no weight-update session is open"
        dtypes = [getattr(torch, name) for name in body["dtypes"]]
        sizes = [
            torch.Size(shape).numel() * dtype.itemsize
            for shape, dtype in zip(body["shapes"], dtypes, strict=True)
        ]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.broadcast(flat, src=0, group=self.groups[body["group_name"]])
        parts = flat.split(sizes)
        for name, part, dtype, shape in zip(
            body["names"], parts, dtypes, body["shapes"], strict=True
        ):
            self.tensors[name] = part.clone().view(dtype).view(shape)
        return FINE

    def _may_load(self, body: Body) -> bool:
        self.flushes.append(body["flush_cache"])
        is_right = body["load_format"] == BUCKETS and body["selector"] == "target"
        return self.is_open and self.is_paused and is_right

    def _from_disk(self, body: Body) -> Answer:
        if self.is_open or not self.is_paused or body["load_format"] != "auto":
            return 400, "it generates, or a session is open"
        self.flushes.append(body["flush_cache"])
        self.tensors = {}
        for path in Path(body["model_path"]).glob("*.safetensors"):
            self.tensors |= load_file(path)
        return FINE

    def _name(self, body: Body) -> Answer:
        self.label = body["new_version"]
        return FINE

    def _generate(self, body: Body) -> Answer:
        assert not self.is_paused
        tokens = body["input_ids"]
        scored = tiny.logprobs(fingerprint(self.tensors), tokens)
        pairs = [[value, token, None] for value, token in zip(scored, tokens, strict=True)]
        return 200, json.dumps({"meta_info": {"input_token_logprobs": pairs}})
