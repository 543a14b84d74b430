"""The sending side of a weight sync on one learner rank: checksums and staging.

Owns this rank's staging copies. Knows nothing of servers, HTTP, losses or the optimizer; what it
reads are live parameters by the local names of the learner's layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megarl.errors import WeightSyncError
from megarl.reshard.arena import arena_layout
from megarl.reshard.execute import slices
from megarl.reshard.layout import Layout, Piece, disjoint_cover, local_box
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import ServerMesh
from megarl.reshard.plan import Plan, make_plan
from megarl.reshard.sglang import sglang_layout
from megarl.weight_sync import coverage
from megarl.weight_sync.checksum import add, box_checksum
from megarl.weight_sync.control import WIRE_DTYPES, SourceSpec, arena_digest
from megarl.weight_sync.transport.shared import Arena, ArenaRef


@dataclass(frozen=True)
class Route:
    """The plan to one kind of server, and where this rank stages what it reads."""

    plan: Plan
    destination: Layout
    offsets: Mapping[str, int]
    num_bytes: int
    digest: str

    @cached_property
    def pieces(self) -> Mapping[int, Sequence[Piece]]:
        """What each server rank holds, as its checksums are listed: for every sync and server."""
        return coverage.held(self.destination)


class Sender:
    """One learner rank's part in every publish. `parameters` are its live tensors by local name.

    Raises WeightSyncError where they are not those of the layout.
    """

    def __init__(
        self,
        run_id: str,
        source: SourceSpec,
        rank: int,
        parameters: Mapping[str, torch.Tensor],
        dtype: str,
    ) -> None:
        if dtype not in WIRE_DTYPES:
            raise WeightSyncError(
                f"wire dtype {dtype!r} is unknown; use one of {list(WIRE_DTYPES)}"
            )
        self.layout = megatron_layout(source.shape, source.mesh, source.vocab_divisor)
        self._run_id, self._source, self._rank, self._dtype = run_id, source, rank, dtype
        self._parameters = parameters
        self._shapes = {parameter.name: parameter.shape for parameter in self.layout.parameters}
        self._mine = disjoint_cover(self.layout)[rank]
        self._routes: dict[ServerMesh, Route] = {}
        self._arenas: dict[ServerMesh, tuple[int, Arena]] = {}
        self._check()

    def _check(self) -> None:
        expected = {t.name: t.shape for t in self.layout.ranks[self._rank].tensors}
        missing = sorted(expected.keys() - self._parameters.keys())
        unknown = sorted(self._parameters.keys() - expected.keys())
        if missing or unknown:
            raise WeightSyncError(
                f"learner rank {self._rank}: parameters are not those of its layout: missing "
                f"{missing[:3]}, unknown {unknown[:3]}; the model was built from another shape"
            )
        for name, shape in expected.items():
            if tuple(self._parameters[name].shape) != shape:
                raise WeightSyncError(
                    f"learner rank {self._rank}: {name} is {tuple(self._parameters[name].shape)}, "
                    f"expected {shape}; the model was built from another shape or mesh"
                )

    def route(self, mesh: ServerMesh) -> Route:
        """The plan to servers of `mesh`, made once. Raises LayoutError where there can be none."""
        if mesh not in self._routes:
            destination = sglang_layout(self._source.shape, mesh)
            plan = make_plan(self.layout, destination)
            itemsize = WIRE_DTYPES[self._dtype].itemsize
            offsets, num_bytes = arena_layout(self.layout.ranks[self._rank], plan, itemsize)
            digest = arena_digest(plan.digest, self._dtype, self._rank, offsets, num_bytes)
            self._routes[mesh] = Route(plan, destination, offsets, num_bytes, digest)
        return self._routes[mesh]

    def checksums(self) -> dict[str, int]:
        """This rank's share of every tensor's checksum, from the live parameters in the wire dtype.

        Shares of all ranks add up to the whole: replicas take turns, nothing is summed twice.
        """
        dtype = WIRE_DTYPES[self._dtype]
        sums: dict[str, int] = {}
        for piece in self._mine:
            values = self._parameters[piece.local][slices(local_box(piece.box, piece.at))]
            shape = self._shapes[piece.tensor]
            part = box_checksum(values.detach().to(dtype), piece.tensor, shape, piece.box)
            sums[piece.tensor] = add([sums.get(piece.tensor, 0), part])
        return sums

    def stage(self, mesh: ServerMesh, generation: int, stamp: str) -> ArenaRef | None:
        """Copy, in the wire dtype, what the plan reads of this rank; None where that is nothing.

        An arena lives as long as its generation. A new number makes a new one: the old one may
        still be read by a server that did not answer.
        """
        route = self.route(mesh)
        if not route.offsets:
            return None
        arena = self._arena(mesh, generation, route)
        arena.stamp("")  # nobody takes it for whole while it is written
        self._copy(arena, route)
        arena.stamp(stamp)
        return arena.ref

    def _arena(self, mesh: ServerMesh, generation: int, route: Route) -> Arena:
        current = self._arenas.get(mesh)
        if current is not None and current[0] == generation:
            return current[1]
        if current is not None:
            del self._arenas[mesh]
            current[1].close()
        arena = Arena(self._run_id, generation, self._rank, route.num_bytes, route.digest)
        self._arenas[mesh] = (generation, arena)
        return arena

    def _copy(self, arena: Arena, route: Route) -> None:
        dtype = WIRE_DTYPES[self._dtype]
        for name, offset in route.offsets.items():
            tensor = self._parameters[name].detach()
            num_bytes = tensor.numel() * dtype.itemsize
            staged = arena.data[offset : offset + num_bytes].view(dtype).view(tensor.shape)
            staged.copy_(tensor)

    def close(self) -> None:
        """Remove this rank's arenas."""
        for _, arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
