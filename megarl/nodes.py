"""Nodes, their GPUs and a role's seat on them, as settings, launcher, learner and servers see them.

Owns those rules and the variables that processes on a node are given. Processes of one node share
memory; between nodes they do not. Imports nothing of megarl and no engine.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

NODE_VARIABLE = "MEGARL_NODE"
ADDRESS_VARIABLE = "MEGARL_LEARNER_ADDRESS"
"""Set by the launcher for the learner: the address of its first node that other nodes reach."""

RUN_ID_VARIABLE = "MEGARL_RUN_ID"
"""Set by the launcher; names this start's shared memory, megarl_<run id>_*, which it sweeps."""

LOOPBACK = "127.0.0.1"

API_KEY_VARIABLE = "MEGARL_ROLLOUT_API_KEY"
ADMIN_KEY_VARIABLE = "MEGARL_ROLLOUT_ADMIN_KEY"
"""What opens a rollout server: given to those that the run starts, which take both out of their
environment, and looked for in ours where servers are given by their URLs.
"""

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Node:
    """A node: its name, the address that servers on it bind to and are reached at, and its host.

    Processes of one node share memory; nodes that only pretend to be several have one `host`.
    Counts are of what the job may use there.
    """

    name: str
    address: str
    host: str
    num_cpus: int
    num_gpus: int


@dataclass(frozen=True, slots=True)
class Seat:
    """A role's place: its nodes, in order, and which of each node's visible GPUs it has.

    `gpus` is (start, end), or None on a CPU.
    """

    nodes: tuple[Node, ...]
    gpus: tuple[int, int] | None

    @property
    def address(self) -> str:
        """The address of its first node."""
        return self.nodes[0].address


def node_name(environ: Mapping[str, str]) -> str:
    """Node identity: MEGARL_NODE, else Slurm's node name, else the host name.

    >>> node_name({"MEGARL_NODE": "a", "SLURMD_NODENAME": "n1"})
    'a'
    """
    return environ.get(NODE_VARIABLE) or environ.get("SLURMD_NODENAME") or socket.gethostname()


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """How many NVIDIA GPUs of this machine a process may use.

    >>> visible_gpus({"CUDA_VISIBLE_DEVICES": "3,5"}), visible_gpus({"CUDA_VISIBLE_DEVICES": ""})
    (2, 0)
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name not in ("", "-1", "NoDevFiles")])
    return len([path for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
