"""Roles as processes of this machine. Owns nothing but that."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from megarl.launch.process import Process, kill_tree
from megarl.nodes import Seat


class LocalSteps:
    """Commands run right here, each in a session of its own."""

    death_signal: int | None = signal.SIGTERM  # a warden then ends its tree

    def command(self, seat: Seat, name: str, argv: Sequence[str]) -> list[str]:
        """`argv` as it is."""
        return list(argv)

    def kill(self, process: Process) -> None:
        """SIGKILL the warden and all below it."""
        kill_tree(process)
