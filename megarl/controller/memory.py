"""The memory ledger of a colocated run: what both sides keep when they have given all they can.

Owns which figures must return to what they were, and the words for one that does not. Knows nothing
of how memory is given or measured.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from megarl.errors import DeviceMemoryError

MIB = 1 << 20
PARTS: Mapping[str, str] = {
    "learner_state_bytes": "the learner's weights, gradients and optimizer state",
    "learner_allocated_bytes": "the learner's tensors (state, activations, staging)",
    "learner_reserved_bytes": "the memory that the learner's allocator keeps",
    "device_rest_bytes": "the servers' memory, CUDA contexts and communicators",
    "learner_parked_bytes": "the learner's state in host memory",
    "learner_rss_bytes": "the learner's processes",
    "servers_rss_bytes": "the servers' processes",
}
"""Figures that are looked at, in the order in which a cause comes before what it causes."""


class MemoryLedger:
    """Compares each floor with the first whole cycle's, within `tolerance_bytes`.

    A floor is measured where both sides have given back what they can, as a learning turn begins.
    The first one of all is no baseline: communicators, moments and graphs are made once after it.

    >>> ledger = MemoryLedger(tolerance_bytes=100)
    >>> for floor in (0, 1000, 1050):
    ...     ledger.check({"learner_allocated_bytes": floor}, servers=())
    """

    def __init__(self, tolerance_bytes: int) -> None:
        self._tolerance_bytes = tolerance_bytes
        self._num_floors = 0
        self._servers: Hashable = None
        self._baseline: dict[str, int] = {}

    def check(self, floor: Mapping[str, int], servers: Hashable) -> None:
        """Look at one floor. `servers` are the server processes: new ones are a new baseline.

        Raises DeviceMemoryError, naming the first part that did not return.
        """
        self._num_floors += 1
        if self._num_floors <= 2 or servers != self._servers:
            self._baseline, self._servers = dict(floor), servers
            return
        for name, what in PARTS.items():
            found, before = floor.get(name, 0), self._baseline.get(name, 0)
            if found > before + self._tolerance_bytes:
                raise DeviceMemoryError(
                    f"{what} did not return: {found / MIB:.0f} MiB where both sides have given "
                    f"memory back, {before / MIB:.0f} MiB after the first cycle ({name}, "
                    f"placement.memory_tolerance_mib = {self._tolerance_bytes // MIB}). It grows "
                    "from cycle to cycle; raise the tolerance only where you know what it is"
                )
