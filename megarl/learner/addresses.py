"""The address that learner rank 0 is reached at. Knows nothing of what is asked there."""

from __future__ import annotations

import os
import socket


def listen_address() -> str:
    """Loopback where all ranks run on this machine, else the address of the job's interface.

    That is the one the other nodes reach rank 0 by, MASTER_ADDR's, or this host's name.
    """
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1" and "SLURM_JOB_ID" not in os.environ:
        return "127.0.0.1"
    for name in (os.environ.get("MASTER_ADDR", ""), socket.gethostname()):
        try:
            address = socket.gethostbyname(name)
            socket.socket(socket.AF_INET, socket.SOCK_STREAM).bind((address, 0))
        except OSError:
            continue
        return address
    return "127.0.0.1"
