"""On which node and GPU each rank of two layouts runs. Knows nothing of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.errors import LayoutError
from megarl.reshard.layout import Layout


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """One GPU (or, on a CPU, one process) of one node."""

    node: int
    gpu: int


@dataclass(frozen=True)
class Placement:
    """The device of every source rank and of every destination rank."""

    source: Mapping[int, Device]
    destination: Mapping[int, Device]

    def check(self, source: Layout, destination: Layout) -> None:
        """Raise LayoutError where a rank of the layouts has no device, or a device no rank."""
        for side, layout, known in (
            ("source", source, self.source),
            ("destination", destination, self.destination),
        ):
            missing = [rank for rank in layout.rank_ids if rank not in known]
            if missing:
                raise LayoutError(
                    f"placement: {len(missing)} {side} ranks of {layout.kind} have no device, the "
                    f"first is rank {missing[0]}; give every rank a node and a GPU"
                )
            strange = [rank for rank in known if rank not in layout.rank_set]
            if strange:
                raise LayoutError(
                    f"placement: {len(strange)} {side} ranks are not of {layout.kind}, the first "
                    f"is rank {strange[0]}; make the placement of these two layouts, source first"
                )

    @property
    def shares_nodes(self) -> bool:
        """Whether some node has ranks of both sides."""
        source = {device.node for device in self.source.values()}
        return any(device.node in source for device in self.destination.values())

    @classmethod
    def one_node(cls, source: Layout, destination: Layout) -> Placement:
        """All ranks on one node, each on a device of its own."""
        first = len(source.rank_ids)
        return cls(
            {rank: Device(0, i) for i, rank in enumerate(source.rank_ids)},
            {rank: Device(0, first + i) for i, rank in enumerate(destination.rank_ids)},
        )

    @classmethod
    def apart(cls, source: Layout, destination: Layout, gpus_per_node: int = 8) -> Placement:
        """Disaggregated: nodes full of source ranks, then nodes full of destination ranks."""
        nodes = -(-len(source.rank_ids) // gpus_per_node)
        return cls(
            _packed(source.rank_ids, gpus_per_node, 0),
            _packed(destination.rank_ids, gpus_per_node, nodes),
        )

    @classmethod
    def together(cls, source: Layout, destination: Layout, gpus_per_node: int = 8) -> Placement:
        """Colocated: the i-th rank of each side shares the i-th GPU."""
        return cls(
            _packed(source.rank_ids, gpus_per_node, 0),
            _packed(destination.rank_ids, gpus_per_node, 0),
        )


def _packed(ranks: tuple[int, ...], gpus_per_node: int, first_node: int) -> dict[int, Device]:
    if gpus_per_node < 1:
        raise LayoutError(f"placement: {gpus_per_node} GPUs per node; give a number from 1 up")
    return {
        rank: Device(first_node + i // gpus_per_node, i % gpus_per_node)
        for i, rank in enumerate(ranks)
    }
