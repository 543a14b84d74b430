"""Which rollout servers may be asked now: each only at the version that it proved.

Owns the choice of the least loaded server, and who waits for one. How servers start and end is
`pool.py`'s, how weights reach them the weight sync's; knows nothing of prompts or rewards. A
server's states:

    starting -> unsynced -> syncing -> routable (at one version) -> dead -> starting again ...

A server whose sync was refused is unsynced again, and paused; only another sync makes it routable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence

from megarl.config.schema import DeadlineConfig
from megarl.errors import RolloutError
from megarl.rollout.proved import ProvedVersions
from megarl.rollout.server import Server, State, described
from megarl.types import ServerEndpoint, SyncReport

log = logging.getLogger(__name__)

SUSPECT_S = 30.0  # a server that neither answers nor ends for so long is killed


class Routing:
    """The servers of a run as those see them who ask, and those who have them synced."""

    def __init__(self, servers: Sequence[Server], deadline: DeadlineConfig) -> None:
        self.versions = ProvedVersions()
        self._servers = tuple(servers)
        self._deadline = deadline
        self._changed = asyncio.Condition()
        self._failure: RolloutError | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def endpoints(self) -> list[ServerEndpoint]:
        """The servers that are up, synced or not."""
        return [server.endpoint for server in self._servers if server.is_alive]

    @property
    def num_routable(self) -> int:
        """Servers that are asked for tokens now."""
        return sum(server.state == "routable" for server in self._servers)

    def is_routable(self, endpoint: ServerEndpoint) -> bool:
        """Whether requests may be sent to this very process now."""
        server = self._named(endpoint.name)
        return server.endpoint == endpoint and server.state == "routable"

    def hold(self, endpoints: Sequence[ServerEndpoint]) -> None:
        """Take servers out of routing before a newer version is written into them.

        They stay out until `mark_verified`, whatever else is found out about them meanwhile.
        """
        for endpoint in endpoints:
            server = self._named(endpoint.name)
            if server.endpoint == endpoint and server.is_alive:
                server.become("syncing")

    def mark_verified(self, report: SyncReport) -> None:
        """Make those of the report's servers routable that proved its version, and the others not.

        What is said of an earlier incarnation is ignored: that process is gone.
        """
        for result in report.servers:
            server = self._named(result.server)
            if result.incarnation != server.endpoint.incarnation or not server.is_alive:
                continue
            if result.verified:
                self.versions.prove(server.endpoint, result.label)
                server.become("routable", report.version)
            else:
                server.become("unsynced", refusal=result.error or "no reason given")
        self._in_background(self._notify())

    @contextlib.asynccontextmanager
    async def acquire(self, version: int, num_samples: int = 1) -> AsyncIterator[ServerEndpoint]:
        """The least loaded server that is routable at `version`, loaded with `num_samples` inside.

        Waits for one: a server that refused a version may be synced again or restarted. Raises
        RolloutError where a server failed for good, or the time of a start and a sync has passed.
        """
        limit_s = self._deadline.server_start_s + self._deadline.sync_s
        try:
            async with asyncio.timeout(limit_s), self._changed:
                await self._changed.wait_for(lambda: self._candidates(version))
                server = min(self._candidates(version), key=lambda server: server.num_inflight)
                server.num_inflight += num_samples
        except TimeoutError:
            raise RolloutError(
                f"no server was routable at version {version} within {limit_s:g} s "
                f"(deadline.server_start_s + deadline.sync_s): {described(self._servers)}"
            ) from None
        try:
            yield server.endpoint
        finally:
            server.num_inflight -= num_samples

    async def settled(self, endpoint: ServerEndpoint) -> None:
        """Wait until a sync that is under way on this server has been decided.

        Raises RolloutError where that takes longer than two attempts may.
        """
        server = self._named(endpoint.name)
        limit_s = 2 * (self._deadline.sync_s + SUSPECT_S)
        try:
            async with asyncio.timeout(limit_s), self._changed:
                await self._changed.wait_for(
                    lambda: server.endpoint != endpoint or server.state != "syncing"
                )
        except TimeoutError:
            raise RolloutError(
                f"the weight sync of {server.name} was not decided within {limit_s:g} s"
            ) from None

    def _named(self, name: str) -> Server:
        return next(server for server in self._servers if server.name == name)

    def _candidates(self, version: int) -> list[Server]:
        if self._failure is not None:
            raise self._failure
        return [s for s in self._servers if s.state == "routable" and s.version == version]

    async def _set(self, server: Server, state: State) -> None:
        server.become(state)
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._background_ended)

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        """An error of the pool's own work must reach those who wait for a server."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None or self._failure is not None:
            return
        if not isinstance(error, RolloutError):
            log.error("server pool failed", exc_info=error)
            error = RolloutError(f"the server pool failed by itself: {error!r}; see the log")
        self._failure = error
        self._in_background(self._notify())
