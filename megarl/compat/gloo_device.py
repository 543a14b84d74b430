"""One Gloo device for all groups that torch makes in a process.

torch makes one for each group: a listening socket, and a thread that wakes a hundred times a second
whether anything comes or not. Megatron-Core makes 24 groups on a rank, and those of a mesh that was
replaced stay. Gloo is made for devices that groups share. Knows nothing of meshes.

For: torch 2.13 (private names are touched). Ends when torch shares devices itself, or lets
`new_group` name them.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]
    ProcessGroupGloo,
    Store,
    distributed_c10d,
)

_THREADS = 2  # of a group, for each device: as torch has it


class _OnSharedDevice(ProcessGroupGloo):  # type: ignore[misc]
    """A group as torch makes it, but for the device."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        options = ProcessGroupGloo._Options()
        options._devices = list(_devices(os.getpid()))
        options._threads = _THREADS * len(options._devices)
        options._timeout = timeout
        super().__init__(store, rank, size, options)


@functools.cache
def _devices(process: int) -> tuple[object, ...]:
    """Those of a process: a fork has no thread of its parent's. As torch chooses them."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not names:
        return (ProcessGroupGloo.create_default_device(),)
    return tuple(ProcessGroupGloo.create_device(interface=name) for name in names.split(","))


def install() -> None:
    """Have torch make its Gloo groups on one device, from now on in this process."""
    distributed_c10d.ProcessGroupGloo = _OnSharedDevice
