"""Stage g, weight sync: stage, send, check, on all learner ranks together.

`WeightSync` is what the learner holds. Knows nothing of losses, prompts or rewards, and of Megatron
only its layout: it is given live tensors by the local names of that.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from megarl.errors import MegarlError, WeightSyncError, in_words
from megarl.reshard.mesh import ServerMesh
from megarl.reshard.plan import minimum_bytes
from megarl.types import QuantizationError, ServerEndpoint, SyncReport, SyncTimes
from megarl.weight_sync.acks import Ack, AckBoard
from megarl.weight_sync.control import (
    ControlMessage,
    SourceSpec,
    meeting_key,
    sent_key,
    stamp,
)
from megarl.weight_sync.exchange import (
    Evidence,
    Outcome,
    late,
    publish_to,
    slowest,
    transfer_until,
)
from megarl.weight_sync.order import Order, Staged, Summed, Target
from megarl.weight_sync.parcels import learner_member, senders
from megarl.weight_sync.pending import Pending
from megarl.weight_sync.places import Place, ServerKind, learner_devices, server_devices
from megarl.weight_sync.probe import PendingProbe, Probe
from megarl.weight_sync.quantized import by_layer, tell
from megarl.weight_sync.sender import Sender
from megarl.weight_sync.server_calls import PauseMode
from megarl.weight_sync.together import from_all, from_first, settle_probe, settle_sums
from megarl.weight_sync.transport.arenas import Policy
from megarl.weight_sync.transport.meeting import Call
from megarl.weight_sync.transport.shared import Arena, ArenaRef

log = logging.getLogger(__name__)

_GRACE_S = 12.0  # past the deadline, for ending sessions; then a server counts as not answering


@dataclass(frozen=True, slots=True)
class _Driving:
    """Threads that publish what was staged, one to each server, and what each has come to.

    `sums` and `probe` are settled while they do so.
    """

    staged: Sequence[Staged]
    sums: Pending[Summed]
    probe: PendingProbe
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    threads: list[threading.Thread] = field(default_factory=list)


class WeightSync:
    """Publishes the learner's weights to SGLang servers; every learner rank holds one.

    `parameters` maps the layout's local names to this rank's live tensors. `dtype` ("fp32" or
    "bf16") is the servers' number format: tensors of another one are cast on the way. `group` is a
    Gloo group of all learner ranks, whose timeout exceeds `deadline_s`; None for one rank alone.
    `host` is the address of learner rank 0 that servers and other ranks reach, and the only one its
    store listens on. `place` is where this rank runs: servers of its node read its arenas, servers
    of other nodes are sent messages of at most `bucket_bytes`; None where all is on one node.
    `server_mesh` says what SGLang's arguments do to the servers' layout, beside the sizes that each
    server says of itself. `arenas` says what becomes of a GPU's memory for staging after each
    publish. `pause` is what becomes of requests that are running when a server is synced. `probe`
    computes on all ranks together what a server must score once it has the weights; None: no probe.
    Making one is collective over the group.
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
        server_mesh: ServerMesh | None = None,
        deadline_s: float = 300.0,
        place: Place | None = None,
        bucket_bytes: int = 64 << 20,
        arenas: Policy = "kept",
        memory: Arena | None = None,
        pause: PauseMode = "retract",
        probe: Callable[[], Probe] | None = None,
    ) -> None:
        self._run_id, self._source, self._rank, self._dtype = run_id, source, rank, dtype
        self._group, self._deadline_s = group, deadline_s
        self.server_mesh = replace(server_mesh or ServerMesh(), cpu=cpu_servers)
        self._bucket_bytes, self._pause, self._probe = bucket_bytes, pause, probe
        self._places = from_all(group, place or Place("", rank))
        self.devices = learner_devices(self._places)
        self.sender = Sender(
            run_id, source, rank, parameters, dtype, self.devices, bucket_bytes, arenas, memory
        )
        self._board = AckBoard(host) if rank == 0 else None
        self._generations: dict[ServerKind, int] = {}
        self._next_generation = 0
        self._reading: set[ServerKind] = set()

    def publish(
        self, version: int, servers: Sequence[ServerEndpoint] = (), until: float | None = None
    ) -> SyncReport:
        """Bring `servers` to policy `version`, which is what the parameters now hold.

        Called on all learner ranks together; `servers` counts on rank 0. It lasts until `until`, a
        time of `time.monotonic` on this rank, None for the deadline from now. It returns on all of
        them when every server has answered or is given up, so that parameters may change and arenas
        be removed. A server that fails is reported, not raised; WeightSyncError is for what goes
        wrong in the learner, and is raised on every rank.
        """
        start = time.monotonic()
        first = self._rank == 0
        if self._board is not None:
            self._board.clear()  # of the publish before; nobody writes for this one before staging
        order = from_first(self._group, self._order(version, servers) if first else None)
        if not isinstance(order, Order):
            raise WeightSyncError(f"version {version} was not staged: {order}")
        staged = from_all(self._group, self._stage(order))
        errors = [part.error for part in staged if part.error]
        if errors:
            raise WeightSyncError(f"version {version} was not staged: " + "; ".join(errors))
        until = start + self._deadline_s if until is None else until
        sending = self._start_sending(order, until)
        driving = self._start_driving(order, servers, staged, until) if first else None
        # Both on all ranks together, while servers take the weights; errors come with the report.
        pending = (driving.sums, driving.probe) if driving else (None, None)
        work = self.sender.checksums if order.targets else dict
        score = self._probe if order.targets else None
        try:
            settle_sums(self._group, self._rank, work, pending[0])
            settle_probe(self._group, self._rank, score, pending[1])
            mine = self._deliver(order, servers, driving, until) if driving else None
            report = from_first(self._group, mine)
        except WeightSyncError as error:
            self._call_off(order, str(error))
            raise
        for server, thread in sending.items():
            thread.join(max(0.0, until + _GRACE_S - time.monotonic()))
            if thread.is_alive():  # should it go on, it must find nothing of the next sync
                self.sender.leave(server)
        self.sender.withdraw()
        if not isinstance(report, SyncReport):
            raise WeightSyncError(f"version {version} was not published: {report}")
        return replace(report, took_s=time.monotonic() - start)

    def _call_off(self, order: Order, why: str) -> None:
        """Have no server wait for learner ranks that have lost each other."""
        if self._board is not None:
            for target in order.targets:
                at = (order.version, order.attempt, target.server, target.incarnation)
                self._board.put(Call(order.store, meeting_key(*at), ()).refusal_key, why)

    def close(self) -> None:
        """Remove this rank's arenas, and leave the groups. A server that did not answer keeps what
        it has mapped."""
        self.sender.close()

    def _kind(self, server: ServerEndpoint) -> ServerKind:
        sizes = {"tp": server.tp, "ep": server.ep, "attention_dp": server.attention_dp}
        mesh = replace(self.server_mesh, **sizes)
        return ServerKind(mesh, server_devices(server, self._places))

    def _order(self, version: int, servers: Sequence[ServerEndpoint]) -> Order | str:
        """Choose generations: arenas that a server may still be reading are not written again.

        Raises nothing, as the other ranks wait for it; text is an error for all to raise.
        """
        assert self._board is not None
        try:
            targets = tuple(
                Target(server.name, server.incarnation, self._kind(server), secrets.token_hex(16))
                for server in servers
            )
        except MegarlError as error:
            return str(error)
        kinds = sorted({t.kind for t in targets}, key=lambda kind: (str(kind.mesh), kind.devices))
        for kind in kinds:
            if kind not in self._generations or kind in self._reading:
                self._generations[kind] = self._next_generation
                self._next_generation += 1
            self._reading.discard(kind)
        generations = tuple((kind, self._generations[kind]) for kind in kinds)
        return Order(version, secrets.token_hex(8), generations, targets, self._board.address)

    def _stage(self, order: Order) -> Staged:
        """This rank's part. Raises nothing: the other ranks would wait for ever."""
        start = time.monotonic()
        try:
            if order.generations:
                self.sender.prepare()
            arenas: dict[ServerKind, ArenaRef] = {}
            for kind, generation in order.generations:
                ref = self.sender.stage(kind, generation, stamp(order.version, order.attempt))
                if ref is not None:
                    arenas[kind] = ref
            took_s = time.monotonic() - start
            return Staged(self._rank, "", arenas, self.sender.quantization_errors, took_s)
        except Exception as error:  # noqa: BLE001 - raised on all ranks after the gather
            text = in_words(error)
            return Staged(self._rank, f"learner rank {self._rank}: {text}")

    def _start_sending(self, order: Order, until: float) -> dict[str, threading.Thread]:
        """One thread for each server that this rank has messages for; each ends by `until`."""
        threads = {
            target.server: threading.Thread(
                target=self._send,
                args=(order, target, transfer_until(until)),
                name=f"weight-sync-to-{target.server}",
                daemon=True,
            )
            for target in order.targets
            if self.sender.sends_to(target.kind)
        }
        for thread in threads.values():
            thread.start()
        return threads

    def _send(self, order: Order, target: Target, until: float) -> None:
        """This rank's messages to one server, and its word on how that went. Raises nothing."""
        at = (order.version, order.attempt, target.server, target.incarnation)
        members = self.sender.route(target.kind).members
        call = Call(order.store, meeting_key(*at), members)
        try:
            sent = self.sender.send(target.server, target.kind, call, until)
            word = Ack(target.token, True, moved_bytes={"network": sent})
        except Exception as error:  # noqa: BLE001 - said in this rank's word
            text = in_words(error)
            word = Ack(target.token, False, text)
        try:
            peers = self.sender.peers(target.server)
            peers.tell(order.store, sent_key(*at, self._rank), word.to_json(), until)
        except (MegarlError, RuntimeError) as error:  # rank 0 names who has not said anything
            log.warning("word not given rank=%d server=%s %s", self._rank, target.server, error)

    def _start_driving(
        self,
        order: Order,
        servers: Sequence[ServerEndpoint],
        staged: Sequence[Staged],
        until: float,
    ) -> _Driving:
        """Publish to all servers at the same time; each thread ends soon after `until`."""
        driving = _Driving(
            staged,
            Pending("sum their weights"),
            PendingProbe(),
        )

        def run(index: int, server: ServerEndpoint) -> None:
            target = order.targets[index]
            driving.outcomes[index] = self._drive_one(server, order, target, driving, until)

        for index, server in enumerate(servers):
            name = f"weight-sync-{server.name}"
            thread = threading.Thread(target=run, args=(index, server), name=name, daemon=True)
            driving.threads.append(thread)
            thread.start()
        return driving

    def _deliver(
        self, order: Order, servers: Sequence[ServerEndpoint], driving: _Driving, until: float
    ) -> SyncReport | str:
        """Rank 0's part, up to the report. Raises nothing, as the other ranks wait for it."""
        for thread in driving.threads:
            thread.join(max(0.0, until + _GRACE_S - time.monotonic()))
        try:
            outcomes = self._outcomes(order, servers, driving)
            report = self._report(order, outcomes, driving)
        except Exception as error:  # noqa: BLE001 - raised on all ranks after the broadcast
            return in_words(error)
        log.info(
            "weights synced version=%d servers=%d verified=%d moved_bytes=%d network_bytes=%d",
            order.version,
            len(servers),
            sum(server.verified for server in report.servers),
            report.moved_bytes,
            report.network_bytes,
        )
        return driving.sums.error or driving.probe.error or report

    def _outcomes(
        self, order: Order, servers: Sequence[ServerEndpoint], driving: _Driving
    ) -> list[Outcome]:
        """How each server's publish ended; those that have not are lost."""
        finished = []
        for index, server in enumerate(servers):
            outcome = driving.outcomes.get(index, Outcome(late(server), is_reading=True))
            if outcome.is_reading:
                self._reading.add(order.targets[index].kind)
            finished.append(outcome)
        return finished

    def _drive_one(
        self,
        server: ServerEndpoint,
        order: Order,
        target: Target,
        driving: _Driving,
        until: float,
    ) -> Outcome:
        assert self._board is not None
        kind = target.kind
        arenas = {part.rank: part.arenas[kind] for part in driving.staged if kind in part.arenas}
        messages = self._messages(order, target, arenas)
        route = self.sender.route(kind)
        at = (order.version, order.attempt, target.server, target.incarnation)
        keys = {learner_member(rank): sent_key(*at, rank) for rank in senders(route.plan)}
        evidence = Evidence(route.pieces, lambda until: driving.sums.wait(until).sums)
        return publish_to(
            server,
            messages,
            evidence,
            self._board,
            until,
            keys,
            self._pause,
            driving.probe.wait,
        )

    def _messages(
        self, order: Order, target: Target, arenas: Mapping[int, ArenaRef]
    ) -> list[ControlMessage]:
        route, mesh = self.sender.route(target.kind), target.kind.mesh
        return [
            ControlMessage(
                version=order.version,
                attempt=order.attempt,
                run_id=self._run_id,
                server=target.server,
                incarnation=target.incarnation,
                tp_rank=tp_rank,
                source=self._source,
                mesh=mesh,
                dtype=self._dtype,
                plan_digest=route.plan.digest,
                arenas=arenas,
                store=order.store,
                token=target.token,
                source_devices=self.devices,
                devices=target.kind.devices,
                members=route.members,
                bucket_bytes=self._bucket_bytes,
            )
            for tp_rank in range(mesh.tp)
        ]

    def _report(self, order: Order, found: Sequence[Outcome], driving: _Driving) -> SyncReport:
        """Bytes over all servers: what they took, what they hold, what was sent by network."""
        width = self.sender.wire.policy.itemsize
        routes = [self.sender.route(target.kind) for target in order.targets]
        lost = by_layer(part.lost for part in driving.staged)
        tell(lost)
        return SyncReport(
            order.version,
            tuple(outcome.result for outcome in found),
            sum(outcome.moved_bytes for outcome in found),
            sum(minimum_bytes(route.destination, width) for route in routes),
            0.0,
            sum(outcome.network_bytes for outcome in found),
            QuantizationError.of(lost),
            SyncTimes(
                max(part.took_s for part in driving.staged),
                driving.sums.wait(0.0).took_s if order.targets else 0.0,
                *slowest(found),
            ),
        )
