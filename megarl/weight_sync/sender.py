"""The sending side of a weight sync on one learner rank: checksums, staging, messages.

Owns this rank's staging copies, for servers of its node, and its part in the groups of the others.
Knows nothing of HTTP, losses or the optimizer; what it reads are live parameters by the local names
of the learner's layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megarl.errors import WeightSyncError
from megarl.reshard.arena import Slot, arena_layout
from megarl.reshard.cover import Cover
from megarl.reshard.execute import held
from megarl.reshard.layout import Layout, Piece
from megarl.reshard.placement import Device
from megarl.reshard.plan import Plan
from megarl.reshard.store import cached_plan
from megarl.weight_sync import coverage, packing, parcels
from megarl.weight_sync.checksum import add
from megarl.weight_sync.checksum_triton import BoxValues
from megarl.weight_sync.control import SourceSpec, arena_digest
from megarl.weight_sync.formats import staged, wire_format
from megarl.weight_sync.live_sums import LiveSums
from megarl.weight_sync.parcels import Parcel
from megarl.weight_sync.places import ServerKind, placement
from megarl.weight_sync.quantized import QuantizedWeights
from megarl.weight_sync.transport.arenas import AnyArena, Policy, make_arena, memory_of
from megarl.weight_sync.transport.meeting import Call
from megarl.weight_sync.transport.p2p import Peers
from megarl.weight_sync.transport.shared import Arena, ArenaRef


@dataclass(frozen=True)
class SendPlan:
    """The plan to one kind of server, where this rank stages what it reads, and what it sends.

    `members` are those of a server's group, empty where all is on one node.
    """

    plan: Plan
    destination: Layout
    slots: Mapping[str, Slot]
    num_bytes: int
    digest: str
    members: tuple[str, ...]
    parcels: tuple[Parcel, ...]

    @cached_property
    def pieces(self) -> Mapping[int, Sequence[Piece]]:
        """What each server rank holds, as its checksums are listed: for every sync and server."""
        return coverage.held(self.destination)


class Sender:
    """One learner rank's part in every publish. `parameters` are its live tensors by local name.

    `devices` are those of all learner ranks; without them all is on one node. `arenas` is the
    policy of those on GPUs, `memory` the shared memory that the parameters of a CPU's rank lie in,
    where they do. Raises WeightSyncError where the parameters are not those of the layout.
    """

    def __init__(
        self,
        run_id: str,
        source: SourceSpec,
        rank: int,
        parameters: Mapping[str, torch.Tensor],
        dtype: str,
        devices: Sequence[Device] = (),
        bucket_bytes: int = 64 << 20,
        arenas: Policy = "kept",
        memory: Arena | None = None,
    ) -> None:
        self.layout = source.layout()
        self.wire = wire_format(dtype, self.layout)
        self._run_id, self._source, self._rank, self._dtype = run_id, source, rank, dtype
        self._parameters = parameters
        self._devices, self._bucket_bytes = tuple(devices), bucket_bytes
        self._policy, self._memory = arenas, memory
        self._sums = LiveSums()
        self._shapes = {parameter.name: parameter.shape for parameter in self.layout.parameters}
        self._mine = self.layout.rank(rank)
        self._share = Cover(self.layout).share(rank)
        self._routes: dict[ServerKind, SendPlan] = {}
        self._arenas: dict[ServerKind, tuple[int, AnyArena]] = {}
        self._peers: dict[str, Peers] = {}
        self._quantized = self._quantizer()
        self._check()
        self.sent = self._parameters if self._quantized is None else self._quantized.sent
        """What travels, by local name: between `prepare` and `withdraw`."""

    def _quantizer(self) -> QuantizedWeights | None:
        if self._source.float8 is None:
            return None
        known = {parameter.name: parameter for parameter in self.layout.parameters}
        return QuantizedWeights(self._parameters, self._mine, known, self._source.float8)

    def prepare(self) -> None:
        """Take the parameters as they are now for what is summed, staged and sent from here on.

        Quantizes what travels as float8; without any there is nothing to do. Raises WeightSyncError
        where a number to be quantized is not finite.
        """
        if self._quantized is None:
            return
        try:
            self._quantized.refresh()
        except FloatingPointError as error:
            raise WeightSyncError(
                f"learner rank {self._rank}: {error}; nothing was sent"
            ) from error

    @property
    def quantization_errors(self) -> Mapping[str, tuple[float, float]]:
        """What `prepare` lost to float8 on this rank, by weight: see `QuantizedWeights.errors`."""
        return self._quantized.errors if self._quantized is not None else {}

    def _check(self) -> None:
        added = self._quantized.added if self._quantized is not None else ()
        expected = {t.name: t.shape for t in self._mine.tensors if t.name not in added}
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

    def route(self, kind: ServerKind) -> SendPlan:
        """The plan to servers of `kind`, made once. Raises LayoutError where there can be none."""
        if kind not in self._routes:
            destination = self._source.server_layout(kind.mesh)
            where = placement(self._devices, kind.devices)
            plan = cached_plan(self.layout, destination, where, self.wire.policy.itemsize)
            slots, num_bytes = arena_layout(self._mine, plan)
            self._routes[kind] = SendPlan(
                plan,
                destination,
                slots,
                num_bytes,
                arena_digest(plan.digest, self._dtype, self._rank, slots, num_bytes),
                parcels.members(plan),
                parcels.from_learner(plan, self._rank, self._bucket_bytes),
            )
        return self._routes[kind]

    def checksums(self) -> dict[str, int]:
        """This rank's share of every tensor's checksum: of the live parameters, as they travel.

        Shares of all ranks add up to the whole: replicas take turns, nothing is summed twice.
        Raises WeightSyncError for weights that are no numbers: nobody is to sample from them. On a
        CPU one pass over the bytes does both.
        """
        found = self._sums.of(self._share, self.sent, self._box)
        wrong = self._not_finite() if found.not_finite is None else found.not_finite
        if wrong:
            raise WeightSyncError(self._diverged(self._share[wrong[0]]))
        sums: dict[str, int] = {}
        for piece, part in zip(self._share, found.totals, strict=True):
            sums[piece.tensor] = add([sums.get(piece.tensor, 0), part])
        return sums

    def _box(self, piece: Piece) -> BoxValues:
        """What one piece is, in the type in which it travels."""
        values = held(piece, self.sent).detach().to(self.wire.of(piece.tensor))
        return BoxValues(values, piece.tensor, self._shapes[piece.tensor], piece.box)

    def _not_finite(self) -> list[int]:
        """Which pieces have weights that are no numbers, where summing does not tell.

        A GPU is asked once. float8 was seen to be finite when it was made.
        """
        known = {piece.local: piece.tensor for piece in self._share}
        names = [name for name in known if self.sent[name].element_size() > 1]
        ends = [torch.stack(torch.aminmax(self.sent[name].detach())) for name in names]
        sent = [end.to(self.wire.of(known[n])).float() for n, end in zip(names, ends, strict=True)]
        finite = torch.stack(sent).isfinite().all(dim=1).tolist() if sent else []
        wrong = {name for name, is_finite in zip(names, finite, strict=True) if not is_finite}
        return [
            index
            for index, piece in enumerate(self._share)  # a padding may hold anything
            if piece.local in wrong and not bool(self._box(piece).values.isfinite().all())
        ]

    def _diverged(self, piece: Piece) -> str:
        """Where weights are no numbers, and what to do."""
        values = held(piece, self._parameters).detach().to(self.wire.of(piece.tensor))
        wrong = values.numel() - int(values.isfinite().sum())
        return (
            f"{piece.tensor} {piece.box}: {wrong} of {values.numel()} weights are not finite in "
            f"{values.dtype}; the policy has diverged, resume from an earlier checkpoint"
        )

    def stage(self, kind: ServerKind, generation: int, stamp: str) -> ArenaRef | None:
        """Copy, in the wire dtype, what servers of this node read; None where that is nothing.

        An arena lives as long as its generation. A new number makes a new one: the old one may
        still be read by a server that did not answer. Nothing is copied of parameters that servers
        can read themselves: until `withdraw` they must not change.
        """
        route = self.route(kind)
        if not route.slots:
            return None
        arena = self._arena(kind, generation, route)
        arena.stamp("")  # nobody takes it for whole while it is written
        self._copy(arena, route)
        arena.stamp(stamp)
        return arena.ref

    def _copy(self, arena: AnyArena, route: SendPlan) -> None:
        for name, slot in route.slots.items():
            if arena.stages(slot.offset):
                staged(arena, slot, self.wire).copy_(self.sent[name].detach())

    def _arena(self, kind: ServerKind, generation: int, route: SendPlan) -> AnyArena:
        current = self._arenas.get(kind)
        if (
            current is not None
            and current[0] == generation
            and current[1].is_lasting
            and current[1].is_whole
        ):
            return current[1]
        if current is not None:
            del self._arenas[kind]
            current[1].close()
        device = next(iter(self._parameters.values())).device
        arena = make_arena(
            self._memory if self._policy == "host" else memory_of(device) or self._memory,
            self._run_id,
            generation,
            self._rank,
            route.num_bytes,
            route.digest,
            *self._live(route),
            self._policy == "kept",
        )
        self._arenas[kind] = (generation, arena)
        return arena

    def _live(self, route: SendPlan) -> tuple[dict[int, torch.Tensor], dict[int, int]]:
        """By their places in an arena: parameters as they travel, and the bytes of the others."""
        live, others = dict[int, torch.Tensor](), dict[int, int]()
        for name, slot in route.slots.items():
            tensor, dtype = self.sent[name], self.wire.of_precision(slot.precision)
            if tensor.dtype == dtype:
                live[slot.offset] = tensor
            else:
                others[slot.offset] = tensor.numel() * dtype.itemsize
        return live, others

    def withdraw(self) -> None:
        """Every server has answered or is given up: parameters may change and be moved."""
        for kind, (_, arena) in list(self._arenas.items()):
            if not arena.is_lasting:
                del self._arenas[kind]
                arena.close()
            elif arena.is_direct:
                arena.stamp("")  # whoever still reads sees that it reads too late
        if self._policy != "kept" and self._quantized is not None:
            self._quantized.drop()
            self._sums = LiveSums()  # what it keeps are views of the copies

    def sends_to(self, kind: ServerKind) -> bool:
        """Whether this rank has messages for servers of `kind`."""
        return bool(self.route(kind).parcels)

    def send(self, server: str, kind: ServerKind, call: Call, until: float) -> int:
        """Meet the group of `server` and send this rank's messages; returns their bytes.

        One thread per server may do so at a time, while the parameters do not change. Raises
        WeightSyncError, naming who, where a member is missing, fails, or is late.
        """
        route, peers = self.route(kind), self.peers(server)
        peers.join(call, until)
        peers.run(call, packing.outgoing(route.parcels, self.sent, self.wire), until)
        return sum(parcel.num_bytes for parcel in route.parcels)

    def peers(self, server: str) -> Peers:
        """This rank's side of the group of `server`."""
        if server not in self._peers:
            device = next(iter(self._parameters.values())).device
            self._peers[server] = Peers(parcels.learner_member(self._rank), device)
        return self._peers[server]

    def leave(self, server: str) -> None:
        """Give up this rank's side of the group of `server`, which may be in use, for a new one."""
        peers = self._peers.pop(server, None)
        if peers is not None:
            peers.close()

    def close(self) -> None:
        """Remove this rank's arenas, and leave the groups."""
        for peers in self._peers.values():
            peers.close()
        self._peers.clear()
        for _, arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
