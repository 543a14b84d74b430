"""Ports: free ones found, given ones checked, before anything listens there.

Knows nothing of who will. A port can be taken between the check and the start; the caller then
tries another one.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Container

from megarl.errors import ConfigError, LaunchError

# Below Linux's ephemeral range (32768 up), from which any outgoing connection may take a port.
FIRST, LAST = 20000, 32767
TRIES = 200


def is_local(host: str) -> bool:
    """Whether a socket can be bound to `host` here."""
    try:
        with socket.socket() as probe:
            probe.bind((host, 0))
            return True
    except OSError:
        return False


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there: bound for a moment here, connected to elsewhere.

    A `host` of "" is every address of this machine.
    """
    if not is_local(host):
        try:
            with socket.create_connection((host, port), timeout=2.0):
                return False
        except OSError:
            return True
    with socket.socket() as probe:
        # As asyncio's servers do: a connection of an earlier server in TIME_WAIT is no hindrance.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def check_port(host: str, port: int, setting: str) -> int:
    """`port`, which is free. Raises ConfigError naming it and the setting that asked for it."""
    if not is_free(host, port):
        raise ConfigError(
            f"port {port} on {host} is taken by another process; set {setting} to a free one, "
            "or to 0 for any"
        )
    return port


def free_port(host: str, taken: Container[int] = ()) -> int:
    """A free port that is not in `taken`. Raises LaunchError where none is found."""
    for _ in range(TRIES):
        port = random.randint(FIRST, LAST)
        if port not in taken and is_free(host, port):
            return port
    raise LaunchError(
        f"no free port on {host} in {FIRST}-{LAST} after {TRIES} tries; end old servers"
    )
