"""Stage g, weight sync: stage, send, check, on all learner ranks together.

`WeightSync` is what the learner holds. Knows nothing of losses, prompts, rewards, or of Megatron:
it is given live tensors by the local names of the learner's layout.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from megarl.errors import MegarlError, WeightSyncError
from megarl.reshard.mesh import ServerMesh
from megarl.reshard.plan import minimum_elements
from megarl.types import ServerEndpoint, ServerSync, SyncReport
from megarl.weight_sync.acks import AckBoard
from megarl.weight_sync.checksum import add
from megarl.weight_sync.control import WIRE_DTYPES, ControlMessage, SourceSpec, stamp
from megarl.weight_sync.exchange import Evidence, publish_to
from megarl.weight_sync.sender import Sender
from megarl.weight_sync.transport.shared import ArenaRef

log = logging.getLogger(__name__)

_GRACE_S = 12.0  # past the deadline, for ending sessions; then a server counts as not answering


@dataclass(frozen=True, slots=True)
class Order:
    """What rank 0 tells the others to stage: for each kind of server, into which generation."""

    version: int
    attempt: str
    generations: tuple[tuple[ServerMesh, int], ...]


@dataclass(frozen=True, slots=True)
class Staged:
    """What one learner rank has to say after staging. An `error` is for all ranks to raise."""

    rank: int
    error: str = ""
    sums: Mapping[str, int] = field(default_factory=dict)
    arenas: Mapping[ServerMesh, ArenaRef] = field(default_factory=dict)


class WeightSync:
    """Publishes the learner's weights to SGLang servers; every learner rank holds one.

    `parameters` maps the layout's local names to this rank's live tensors. `dtype` ("fp32" or
    "bf16") is the servers' number format: tensors of another one are cast on the way. `group` is a
    Gloo group of all learner ranks, whose timeout exceeds `deadline_s`; None for one rank alone.
    `host` is the address of learner rank 0 that servers reach, and the only one its store listens
    on.
    """

    def __init__(
        self,
        run_id: str,
        source: SourceSpec,
        rank: int,
        parameters: Mapping[str, torch.Tensor],
        dtype: str,
        *,
        group: dist.ProcessGroup | None = None,
        host: str = "127.0.0.1",
        cpu_servers: bool = False,
        deadline_s: float = 300.0,
    ) -> None:
        self._run_id, self._source, self._rank, self._dtype = run_id, source, rank, dtype
        self._group, self._cpu_servers, self._deadline_s = group, cpu_servers, deadline_s
        self.sender = Sender(run_id, source, rank, parameters, dtype)
        self._board = AckBoard(host) if rank == 0 else None
        self._generations: dict[ServerMesh, int] = {}
        self._next_generation = 0
        self._reading: set[ServerMesh] = set()

    def publish(self, version: int, servers: Sequence[ServerEndpoint] = ()) -> SyncReport:
        """Bring `servers` to policy `version`, which is what the parameters now hold.

        Called on all learner ranks together; `servers` counts on rank 0. It returns on all of them
        when every server has answered or is given up, so that parameters may change and arenas be
        removed. A server that fails is reported, not raised; WeightSyncError is for what goes wrong
        in the learner, and is raised on every rank.
        """
        start = time.monotonic()
        first = self._rank == 0
        order = self._broadcast(self._order(version, servers) if first else None)
        if not isinstance(order, Order):
            raise WeightSyncError(f"version {version} was not staged: {order}")
        staged = self._gather(self._stage(order))
        errors = [part.error for part in staged if part.error]
        if errors:
            raise WeightSyncError(f"version {version} was not staged: " + "; ".join(errors))
        until = start + self._deadline_s
        report = self._broadcast(self._deliver(order, servers, staged, until) if first else None)
        if not isinstance(report, SyncReport):
            raise WeightSyncError(f"version {version} was not published: {report}")
        return replace(report, took_s=time.monotonic() - start)

    def close(self) -> None:
        """Remove this rank's arenas. A server that did not answer keeps what it has mapped."""
        self.sender.close()

    def _mesh(self, server: ServerEndpoint) -> ServerMesh:
        return ServerMesh(tp=server.tp, cpu=self._cpu_servers)

    def _order(self, version: int, servers: Sequence[ServerEndpoint]) -> Order | str:
        """Choose generations: arenas that a server may still be reading are not written again.

        Raises nothing, as the other ranks wait for it; text is an error for all to raise.
        """
        try:
            meshes = sorted({self._mesh(server) for server in servers}, key=lambda mesh: mesh.tp)
        except MegarlError as error:
            return str(error)
        for mesh in meshes:
            if mesh not in self._generations or mesh in self._reading:
                self._generations[mesh] = self._next_generation
                self._next_generation += 1
            self._reading.discard(mesh)
        generations = tuple((mesh, self._generations[mesh]) for mesh in meshes)
        return Order(version, secrets.token_hex(8), generations)

    def _stage(self, order: Order) -> Staged:
        """This rank's part. Raises nothing: the other ranks would wait for ever."""
        try:
            sums = self.sender.checksums() if order.generations else {}
            arenas: dict[ServerMesh, ArenaRef] = {}
            for mesh, generation in order.generations:
                ref = self.sender.stage(mesh, generation, stamp(order.version, order.attempt))
                if ref is not None:
                    arenas[mesh] = ref
            return Staged(self._rank, "", sums, arenas)
        except Exception as error:  # noqa: BLE001 - raised on all ranks after the gather
            text = str(error) if isinstance(error, WeightSyncError) else repr(error)
            return Staged(self._rank, f"learner rank {self._rank}: {text}")

    def _deliver(
        self,
        order: Order,
        servers: Sequence[ServerEndpoint],
        staged: Sequence[Staged],
        until: float,
    ) -> SyncReport | str:
        """Rank 0's part, up to the report. Raises nothing, as the other ranks wait for it."""
        try:
            results = self._drive(order, servers, staged, until)
            report = self._report(order, servers, results)
        except Exception as error:  # noqa: BLE001 - raised on all ranks after the broadcast
            return str(error) if isinstance(error, MegarlError) else repr(error)
        log.info(
            "weights synced version=%d servers=%d verified=%d moved_bytes=%d",
            order.version,
            len(servers),
            sum(server.verified for server in results),
            report.moved_bytes,
        )
        return report

    def _drive(
        self,
        order: Order,
        servers: Sequence[ServerEndpoint],
        staged: Sequence[Staged],
        until: float,
    ) -> list[ServerSync]:
        """All servers at the same time, each in a thread that ends by itself soon after `until`."""
        assert self._board is not None
        wanted: dict[str, int] = {}
        for part in staged:
            for tensor, total in part.sums.items():
                wanted[tensor] = add([wanted.get(tensor, 0), total])
        results: dict[int, tuple[ServerSync, bool]] = {}
        threads = []
        for index, server in enumerate(servers):
            thread = threading.Thread(
                target=self._drive_one,
                args=(index, server, order, staged, wanted, until, results),
                name=f"weight-sync-{server.name}",
                daemon=True,
            )
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join(max(0.0, until + _GRACE_S - time.monotonic()))
        finished = []
        for index, server in enumerate(servers):
            late = ServerSync(
                server.name, server.incarnation, False, f"{server.name}: no answer in time"
            )
            result, reading = results.get(index, (late, True))
            if reading:
                self._reading.add(self._mesh(server))
            finished.append(result)
        return finished

    def _drive_one(
        self,
        index: int,
        server: ServerEndpoint,
        order: Order,
        staged: Sequence[Staged],
        wanted: Mapping[str, int],
        until: float,
        results: dict[int, tuple[ServerSync, bool]],
    ) -> None:
        assert self._board is not None
        mesh = self._mesh(server)
        arenas = {part.rank: part.arenas[mesh] for part in staged if mesh in part.arenas}
        messages = self._messages(server, mesh, order, arenas)
        evidence = Evidence(self.sender.route(mesh).pieces, wanted)
        results[index] = publish_to(server, messages, evidence, self._board, until)

    def _messages(
        self,
        server: ServerEndpoint,
        mesh: ServerMesh,
        order: Order,
        arenas: Mapping[int, ArenaRef],
    ) -> list[ControlMessage]:
        assert self._board is not None
        token = secrets.token_hex(16)
        return [
            ControlMessage(
                version=order.version,
                attempt=order.attempt,
                run_id=self._run_id,
                server=server.name,
                incarnation=server.incarnation,
                tp_rank=tp_rank,
                source=self._source,
                mesh=mesh,
                dtype=self._dtype,
                plan_digest=self.sender.route(mesh).plan.digest,
                arenas=arenas,
                store=self._board.address,
                token=token,
            )
            for tp_rank in range(mesh.tp)
        ]

    def _report(
        self, order: Order, servers: Sequence[ServerEndpoint], results: Sequence[ServerSync]
    ) -> SyncReport:
        """Bytes are the plans': what they move, and what any plan must move, over all servers."""
        itemsize = WIRE_DTYPES[self._dtype].itemsize
        routes = [self.sender.route(self._mesh(server)) for server in servers]
        moved = sum(route.plan.num_elements() for route in routes) * itemsize
        minimum = sum(minimum_elements(route.destination) for route in routes) * itemsize
        return SyncReport(order.version, tuple(results), moved, minimum, 0.0)

    def _broadcast(self, value: object) -> object:
        """Rank 0's value, on every rank."""
        box = [value]
        if self._group is not None:
            source = dist.get_global_rank(self._group, 0)
            dist.broadcast_object_list(box, src=source, group=self._group)
        return box[0]

    def _gather(self, mine: Staged) -> list[Staged]:
        """What every rank staged, on every rank."""
        if self._group is None:
            return [mine]
        parts: list[Staged | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(parts, mine, group=self._group)
        return [part for part in parts if part is not None]
