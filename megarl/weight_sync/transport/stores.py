"""Connections to the store on learner rank 0, through which the members of a sync find each other.

Owns how one is made and how long that may take. Knows nothing of what is written there.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from megarl.errors import WeightSyncError

CONNECT_S = 10.0  # a receiver holds up its server for no longer than this when the learner is gone


def connect(address: tuple[str, int]) -> TCPStore:
    """A connection to the store, kept for the learner's life.

    Raises WeightSyncError at once where nobody listens: torch's store would go on trying.
    """
    try:
        socket.create_connection(address, CONNECT_S).close()
    except OSError as error:
        raise WeightSyncError(
            f"no store at {address[0]}:{address[1]}, the learner has ended or is unreachable "
            f"({error})"
        ) from error
    timeout = timedelta(seconds=CONNECT_S)
    return TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timeout)
