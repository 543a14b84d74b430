"""Which node a process is on, by the one rule that launcher, learner and servers share.

Owns the rule. Processes of one node share memory; between nodes they do not.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

NODE_VARIABLE = "MEGARL_NODE"
ADDRESS_VARIABLE = "MEGARL_LEARNER_ADDRESS"
"""Set by the launcher for the learner: the address of its first node that other nodes reach."""


def node_name(environ: Mapping[str, str]) -> str:
    """Node identity: MEGARL_NODE, else Slurm's node name, else the host name.

    >>> node_name({"MEGARL_NODE": "a", "SLURMD_NODENAME": "n1"})
    'a'
    """
    return environ.get(NODE_VARIABLE) or environ.get("SLURMD_NODENAME") or socket.gethostname()
