"""Stage g as the controller sees it: which version the weights are, and which servers proved it.

Owns the order of publishing, retrying and restarting. How weights travel is `weight_sync/`'s, in
the learner; what a server may be asked is `rollout/`'s.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict

from megarl.controller.turn import Turn
from megarl.errors import WeightSyncError
from megarl.learner.client import LearnerClient
from megarl.observe.metrics import MetricsLog
from megarl.rollout.pool import ServerPool
from megarl.types import QuantizationError, ServerEndpoint, SyncReport

log = logging.getLogger(__name__)
ATTEMPTS = 2  # a refused sync is tried once more before its server is started anew


class Publisher:
    """Publishes policy versions; a server is asked for tokens only at a version that it proved."""

    def __init__(
        self,
        learner: LearnerClient,
        servers: ServerPool,
        metrics: MetricsLog,
        turn: Turn | None = None,
    ) -> None:
        self._learner = learner
        self._turn = turn or Turn()
        self._servers = servers
        self._metrics = metrics
        self._lock = asyncio.Lock()
        self._version: int | None = None  # None while the weights are between two versions
        self._has_worked = False
        servers.on_restart = self.rejoin

    async def leave_version(self) -> None:
        """The learner's weights are about to change, and are no version until `publish`.

        Waits for a rejoin that is under way: the learner would carry out a part of it after its
        next step, and prove weights under the version that they have left.
        """
        async with self._lock:
            self._version = None

    async def publish(self, version: int) -> dict[str, float | int]:
        """Send `version` to every living server and make those routable that proved it.

        One that refused twice, or did not answer once, is started anew, and rejoins. Raises
        WeightSyncError where none proved the first version of all: what has never worked is not
        mended by restarts.
        """
        async with self._lock:
            report = await self._publish(version, self._servers.endpoints())
            self._version = version
        proved = sum(server.verified for server in report.servers)
        if report.servers and not proved and not self._has_worked:
            reasons = "; ".join(f"{s.server}: {s.error}" for s in report.servers)
            raise WeightSyncError(
                f"version {version} was proved by none of {len(report.servers)} servers "
                f"({reasons}); nothing was sampled from it. See the servers' logs in the run folder"
            )
        self._has_worked = self._has_worked or proved > 0
        probes = [s.probe_max_abs_logprob for s in report.servers]
        differences = [found for found in probes if found is not None]
        return {
            "weight_sync/bytes": report.moved_bytes,
            "weight_sync/minimum_bytes": report.minimum_bytes,
            "weight_sync/network_bytes": report.network_bytes,
            "weight_sync/verified_servers": proved,
            **{f"weight_sync/{name}": value for name, value in asdict(report.times).items()},
            **_lost(report.quantization),
            **({"weight_sync/probe_max_abs_logprob": max(differences)} if differences else {}),
        }

    async def rejoin(self, endpoint: ServerEndpoint) -> None:
        """Bring a restarted server to the current version; while weights change, `publish` will."""
        async with self._lock, self._turn.rejoining() as can_rejoin:
            if self._version is None or not can_rejoin:
                return
            report = await self._publish(self._version, [endpoint])
        self._metrics.event(
            "server_rejoined",
            server=endpoint.name,
            incarnation=endpoint.incarnation,
            version=report.version,
            verified=int(all(server.verified for server in report.servers)),
        )

    async def _publish(self, version: int, endpoints: list[ServerEndpoint]) -> SyncReport:
        report = await self._publish_once(version, endpoints)
        for _ in range(ATTEMPTS - 1):
            self._refused(report)
            refused = {s.server for s in report.servers if not s.verified and not s.is_lost}
            if not refused:
                break
            tried = [endpoint for endpoint in endpoints if endpoint.name in refused]
            report = merged(report, await self._publish_once(version, tried))
        for server in report.servers:
            if not server.verified:
                self._servers.restart(server.server, server.incarnation)
        return report

    async def _publish_once(self, version: int, endpoints: list[ServerEndpoint]) -> SyncReport:
        """One attempt. Until its report, and where there is none, no server of it is routable."""
        self._servers.hold(endpoints)
        report = await self._learner.publish(version, endpoints)
        self._servers.mark_verified(report)
        return report

    def _refused(self, report: SyncReport) -> None:
        for server in report.servers:
            if not server.verified:
                log.warning(
                    "weight sync refused version=%d server=%s why=%s",
                    report.version, server.server, server.error,
                )  # fmt: skip
                self._metrics.event(
                    "weight_sync_refused",
                    version=report.version,
                    server=server.server,
                    error=server.error,
                )


def _lost(quantization: QuantizationError) -> dict[str, float | int]:
    """What a sync lost to float8; nothing where it quantized nothing.

    >>> _lost(QuantizationError(0.03, 0.02, "model.layers.7"))["weight_sync/quantization_layer"]
    7
    """
    if not quantization.worst:
        return {}
    number = quantization.worst.rpartition(".")[2]
    return {
        "weight_sync/quantization_error": quantization.largest,
        "weight_sync/quantization_error_mean": quantization.mean,
        **({"weight_sync/quantization_layer": int(number)} if number.isdigit() else {}),
    }


def merged(first: SyncReport, again: SyncReport) -> SyncReport:
    """One report of two attempts: each server's newer result, the bytes and seconds of both."""
    newer = {server.server: server for server in again.servers}
    return SyncReport(
        version=again.version,
        servers=tuple(newer.get(server.server, server) for server in first.servers),
        moved_bytes=first.moved_bytes + again.moved_bytes,
        minimum_bytes=first.minimum_bytes,
        took_s=first.took_s + again.took_s,
        network_bytes=first.network_bytes + again.network_bytes,
        quantization=max(first.quantization, again.quantization, key=lambda lost: lost.largest),
        times=first.times.plus(again.times),
    )
