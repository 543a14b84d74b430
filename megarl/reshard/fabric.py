"""How fast bytes can move between GPUs, as data sheets state it, and the seconds that follow.

Owns the rates of known machines and the floor of a plan's seconds: the most loaded resource alone.
Nothing here was measured. Real transfers reach less than these rates and add what no byte count
shows: starting copies, packing, waiting for one another, quantizing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from megarl.errors import LayoutError
from megarl.reshard.placement import Device, Placement
from megarl.reshard.routes import Traffic

ResourceName = Literal["nic_out", "nic_in", "nvlink_out", "nvlink_in", "memory"]

WORDS: Mapping[ResourceName, str] = {
    "nic_out": "network, sending",
    "nic_in": "network, receiving",
    "nvlink_out": "NVLink, sending",
    "nvlink_in": "NVLink, receiving",
    "memory": "GPU memory",
}


@dataclass(frozen=True, slots=True)
class Fabric:
    """Rates of one GPU, in bytes per second and direction, and how many GPUs share NVLink.

    `memory_bytes_per_s` counts reads and writes together.
    """

    name: str
    nic_bytes_per_s: float
    nvlink_bytes_per_s: float
    memory_bytes_per_s: float
    gpus_per_node: int
    words: str

    def rate(self, resource: ResourceName) -> float:
        """Bytes per second of a resource.

        >>> FABRICS["h100"].rate("nic_in") / 1e9
        50.0
        """
        if resource == "memory":
            return self.memory_bytes_per_s
        network = resource in ("nic_out", "nic_in")
        return self.nic_bytes_per_s if network else self.nvlink_bytes_per_s


# NVIDIA's data sheets. NVLink is stated there for both directions together: 600, 900, 1800 GB/s.
# Network: one NIC for each GPU, HDR 200 Gb/s (DGX A100), NDR 400 Gb/s (DGX H100, H200, B200,
# GB200 NVL72), XDR 800 Gb/s (DGX B300, ConnectX-8).
FABRICS: Mapping[str, Fabric] = {
    fabric.name: fabric
    for fabric in (
        Fabric("a100", 25e9, 300e9, 2.039e12, 8, "DGX A100 80 GB: 200 Gb/s, NVLink 3, HBM2e"),
        Fabric("h100", 50e9, 450e9, 3.35e12, 8, "DGX H100: 400 Gb/s, NVLink 4, HBM3"),
        Fabric("h200", 50e9, 450e9, 4.8e12, 8, "DGX H200: 400 Gb/s, NVLink 4, HBM3e"),
        Fabric("b200", 50e9, 900e9, 8e12, 8, "DGX B200: 400 Gb/s, NVLink 5, HBM3e"),
        Fabric("b300", 100e9, 900e9, 8e12, 8, "DGX B300: 800 Gb/s, NVLink 5, HBM3e"),
        Fabric("gb200", 50e9, 900e9, 8e12, 72, "GB200 NVL72: 400 Gb/s, NVLink 5, HBM3e"),
    )
}
DEFAULT = "h100"


def fabric_of(name: str) -> Fabric:
    """The known machine of that name. Raises LayoutError with the names that there are."""
    if name not in FABRICS:
        raise LayoutError(f"fabric {name!r} is unknown; use one of {', '.join(FABRICS)}")
    return FABRICS[name]


@dataclass(frozen=True, slots=True)
class Load:
    """One resource over all GPUs: the bytes of all, and those and the seconds of the busiest."""

    resource: ResourceName
    total_bytes: int
    busiest: Device
    busiest_bytes: int
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """Seconds of one plan on one fabric.

    `floor_s` is the slowest resource alone, as if chunks overlapped perfectly; `serial_s` adds
    network, NVLink and memory up, as if each waited for the one before.
    """

    fabric: Fabric
    loads: tuple[Load, ...]

    @property
    def slowest(self) -> Load:
        """The resource that takes longest."""
        return max(self.loads, key=lambda load: load.seconds)

    @property
    def floor_s(self) -> float:
        """Seconds of the slowest resource."""
        return self.slowest.seconds

    @property
    def serial_s(self) -> float:
        """Seconds where nothing overlaps."""
        seconds = {load.resource: load.seconds for load in self.loads}
        network = max(seconds["nic_out"], seconds["nic_in"])
        nvlink = max(seconds["nvlink_out"], seconds["nvlink_in"])
        return network + nvlink + seconds["memory"]


def predict(traffic: Traffic, placement: Placement, fabric: Fabric) -> Prediction:
    """The seconds of a plan's bytes.

    A byte sent or received by network is read or written once in the GPU's memory, a local copy
    does both; packing it into a buffer first would add two more.
    """
    used: dict[ResourceName, dict[Device, int]] = {name: {} for name in WORDS}
    for field in fields(traffic):
        side = placement.source if field.name in ("network_out", "node_out") else None
        by_rank: dict[int, int] = getattr(traffic, field.name)
        for rank, size in by_rank.items():
            device = (side or placement.destination)[rank]
            kind, _, way = field.name.partition("_")
            _add(used["memory"], device, size if way else 2 * size)
            if kind == "network":
                _add(used["nic_out" if way == "out" else "nic_in"], device, size)
            elif way:
                _add(used["nvlink_out" if way == "out" else "nvlink_in"], device, size)
    return Prediction(fabric, tuple(_load(name, used[name], fabric) for name in WORDS))


def _load(name: ResourceName, used: Mapping[Device, int], fabric: Fabric) -> Load:
    busiest = max(used, key=lambda device: (used[device], -device.node, -device.gpu), default=None)
    size = 0 if busiest is None else used[busiest]
    return Load(name, sum(used.values()), busiest or Device(0, 0), size, size / fabric.rate(name))


def _add(sums: dict[Device, int], device: Device, size: int) -> None:
    sums[device] = sums.get(device, 0) + size
