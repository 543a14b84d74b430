"""The address that learner rank 0 is reached at. Knows nothing of what is asked there."""

from __future__ import annotations

import os
import socket

from megarl.nodes import ADDRESS_VARIABLE


def listen_address() -> str:
    """The address of the learner's first node, as the launcher gives it.

    Without a launcher: loopback where all ranks run on this machine, else the one that the other
    nodes reach rank 0 by, MASTER_ADDR's, or this host's name.
    """
    if given := os.environ.get(ADDRESS_VARIABLE):
        return given
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1" and "SLURM_JOB_ID" not in os.environ:
        return "127.0.0.1"
    for name in (os.environ.get("MASTER_ADDR", ""), socket.gethostname()):
        try:
            address = socket.gethostbyname(name)
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.bind((address, 0))
        except OSError:
            continue
        return address
    return "127.0.0.1"
