"""Where learner and server ranks run, as the planner wants it: numbered nodes and GPUs.

Owns the numbering. Servers that are apart from the learner in the same way get the same numbers,
whatever their nodes are called, and so share one plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.errors import WeightSyncError
from megarl.reshard.mesh import ServerMesh
from megarl.reshard.placement import Device, Placement
from megarl.types import ServerEndpoint

_OWN = 1 << 16  # from here on "GPUs" are processes that share no GPU with anyone


@dataclass(frozen=True, slots=True)
class Place:
    """A learner rank's node, by name, and its GPU there (on a CPU any number of its own)."""

    node: str
    gpu: int


@dataclass(frozen=True, slots=True)
class ServerKind:
    """What a plan depends on of a server: its mesh, and where its ranks are.

    Without `devices` all are on the one node that the learner is on.
    """

    mesh: ServerMesh
    devices: tuple[Device, ...] = ()


def learner_devices(places: Sequence[Place]) -> tuple[Device, ...]:
    """The device of each learner rank; nodes are numbered as they come.

    >>> learner_devices([Place("b", 0), Place("a", 0), Place("b", 1)])
    (Device(node=0, gpu=0), Device(node=1, gpu=0), Device(node=0, gpu=1))
    """
    numbers = _numbers(places)
    return tuple(Device(numbers[place.node], place.gpu) for place in places)


def server_devices(server: ServerEndpoint, learner: Sequence[Place]) -> tuple[Device, ...]:
    """The device of each rank of `server`; nodes that have no learner rank are numbered after.

    A server that does not say where it is, is on the node of learner rank 0. Raises WeightSyncError
    where it says so of another number of ranks than it has.
    """
    numbers = _numbers(learner)
    nodes = server.nodes or (learner[0].node,) * server.tp
    gpus = server.gpus or tuple(range(_OWN, _OWN + server.tp))
    if len(nodes) != server.tp or len(gpus) != server.tp:
        raise WeightSyncError(
            f"{server.name}: {len(nodes)} nodes and {len(gpus)} GPUs for tp={server.tp}; "
            "give one of each for every TP rank"
        )
    return tuple(
        Device(numbers.setdefault(node, len(numbers)), gpu)
        for node, gpu in zip(nodes, gpus, strict=True)
    )


def placement(source: Sequence[Device], destination: Sequence[Device]) -> Placement | None:
    """The planner's placement of both sides; None, its one node, where either is not said."""
    if not source or not destination:
        return None
    return Placement(dict(enumerate(source)), dict(enumerate(destination)))


def _numbers(places: Sequence[Place]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for place in places:
        numbers.setdefault(place.node, len(numbers))
    return numbers
