"""The rollout servers of a run: started, watched, restarted, and asked only at a version they
proved.

Owns the choice of the least loaded server and what follows a death. How weights reach a server is
the weight sync's; knows nothing of prompts or rewards. A server's states:

    starting -> unsynced -> syncing -> routable (at one version) -> dead -> starting again ...

A server whose sync was refused is unsynced again, and paused; only another sync makes it routable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path

import aiohttp

from megarl.config.schema import Config
from megarl.errors import MegarlError, RolloutError
from megarl.linux import tree_rss_bytes
from megarl.nodes import Device
from megarl.rollout import control, external
from megarl.rollout.external import Connector
from megarl.rollout.occupation import Occupation
from megarl.rollout.proved import ProvedVersions
from megarl.rollout.server import (
    Server,
    Spawn,
    Starter,
    State,
    described,
    log_end,
    own_servers,
    url_port,
)
from megarl.types import ServerEndpoint, SyncReport

log = logging.getLogger(__name__)

SUSPECT_S = 30.0  # a server that neither answers nor ends for so long is killed

RestartHook = Callable[[ServerEndpoint], Awaitable[None]]


class ServerPool:
    """`rollout.servers` SGLang servers. `hosts[i]` is the address that server i binds to, nodes[i]
    and gpus[i] say where its ranks run (see ServerEndpoint); `run_dir/logs` gets the logs.

    `on_restart` is called with a restarted server's endpoint, and must publish the current policy
    to it. Servers of `rollout.urls` are neither started nor ended: one that does not answer is
    dead, and back, as a new incarnation, when it answers again.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        spawn: Spawn,
        device: Device,
        hosts: Sequence[str] = (),
        on_restart: RestartHook | None = None,
        nodes: Sequence[str] = (),
        gpus: Sequence[tuple[int, ...]] = (),
    ) -> None:
        self.on_restart = on_restart
        self.occupation = Occupation(self)
        self.versions = ProvedVersions()
        self._config = config
        self._run_dir = run_dir
        self._spawn = spawn
        self._device: Device = device
        self._changed = asyncio.Condition()
        self._failure: RolloutError | None = None
        self._is_closing = False
        self._holds_starts = False
        self._num_starting = 0  # of restarts only
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_doubt: dict[ServerEndpoint, int] = {}  # with the version it was routable at
        self._starter: Starter | Connector | None = None
        self._servers = (
            external.servers(config, os.environ)
            if config.rollout.urls
            else own_servers(config, hosts, nodes, gpus)
        )

    async def start(self) -> None:
        """Start all servers and wait until each is healthy; they are unsynced then.

        Raises ConfigError for a taken port or unusable arguments, RolloutError with the end of the
        log of the first server that fails or is late. The pool must be closed in any case.
        """
        self._starter = self._make_starter()
        starts = [asyncio.create_task(self._bring_up(server, 0)) for server in self._servers]
        try:
            await asyncio.gather(*starts)
        finally:
            await _cancelled(starts)
        for server in self._servers:
            await self._set(server, "unsynced")
            self._in_background(self._watch(server))

    def _make_starter(self) -> Starter | Connector:
        http = aiohttp.ClientSession()
        if self._config.rollout.urls:
            return Connector(self._config, http)
        return Starter(
            self._config,
            self._run_dir,
            self._spawn,
            self._device,
            api_key=secrets.token_urlsafe(24),
            admin_key=secrets.token_urlsafe(24),
            http=http,
        )

    async def aclose(self) -> None:
        """Kill every server that the run has started, and wait until they are gone."""
        self._is_closing = True
        await _cancelled(list(self._tasks))
        handles = [server.handle for server in self._servers if server.handle is not None]
        for handle in handles:
            handle.kill()
        await asyncio.gather(*(handle.wait() for handle in handles))
        for server in self._servers:
            await self._set(server, "dead")
        if self._starter is not None:
            await self._starter.http.close()

    def endpoints(self) -> list[ServerEndpoint]:
        """The servers that are up, synced or not."""
        return [server.endpoint for server in self._servers if server.is_alive]

    @property
    def num_restarts(self) -> int:
        """How often servers were started again in this run."""
        return sum(server.num_restarts for server in self._servers)

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

    def restart(self, name: str, incarnation: int | None = None) -> None:
        """Kill a server, which is then started anew; nothing where that incarnation is gone."""
        server = self._named(name)
        is_meant = incarnation in (None, server.endpoint.incarnation)
        if is_meant and server.is_alive and server.handle is not None:
            server.become("dead")
            server.handle.kill()

    async def end(self, endpoint: ServerEndpoint, why: str) -> None:
        """As `restart`, and wait until the process is gone. `why` is told if it cannot go on."""
        server = self._named(endpoint.name)
        handle = server.handle
        if endpoint.incarnation == server.endpoint.incarnation and handle is not None:
            server.problem = why
            self.restart(endpoint.name, endpoint.incarnation)
            await handle.wait()

    async def hold_starts(self) -> None:
        """Start no server anew until `allow_starts`; wait for starts and doubts that are under way.

        A server that starts takes what memory it finds, and one in doubt is asked for a token.
        """
        self._holds_starts = True
        async with self._changed:
            await self._changed.wait_for(lambda: not self._num_starting and not self._in_doubt)

    async def allow_starts(self) -> None:
        """Let servers that have ended start anew again."""
        self._holds_starts = False
        await self._notify()

    @property
    def http(self) -> aiohttp.ClientSession:
        """The session for small calls to the servers; there is one once the pool has started."""
        assert self._starter is not None
        return self._starter.http

    @property
    def num_routable(self) -> int:
        """Servers that are asked for tokens now."""
        return sum(server.state == "routable" for server in self._servers)

    @property
    def rss_bytes(self) -> int:
        """Resident memory of all servers' processes on this machine."""
        handles = [server.handle for server in self._servers if server.handle is not None]
        return tree_rss_bytes([handle.pid for handle in handles])

    @contextlib.asynccontextmanager
    async def acquire(self, version: int, num_samples: int = 1) -> AsyncIterator[ServerEndpoint]:
        """The least loaded server that is routable at `version`, loaded with `num_samples` inside.

        Waits for one: a server that refused a version may be synced again or restarted. Raises
        RolloutError where a server failed for good, or the time of a start and a sync has passed.
        """
        limit_s = self._config.deadline.server_start_s + self._config.deadline.sync_s
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

    def report_trouble(self, endpoint: ServerEndpoint, error: Exception) -> None:
        """Take a server out of routing after a failed request, until it answers or has ended."""
        server = self._named(endpoint.name)
        if server.endpoint != endpoint or server.state != "routable":
            return
        log.warning("rollout server in doubt server=%s error=%s", server.name, error)
        is_known = endpoint in self._in_doubt
        self._in_doubt[endpoint] = server.version
        server.become("unsynced")
        if not is_known:
            self._in_background(self._resolve_doubt(server))

    async def answers(self, endpoint: ServerEndpoint) -> bool:
        """Whether a server's scheduler answers, at the latest after SUSPECT_S."""
        assert self._starter is not None
        try:
            async with asyncio.timeout(SUSPECT_S):
                # SGLang's HTTP side outlives its scheduler by seconds, so the scheduler is asked.
                await control.until(control.is_healthy, self._starter.http, endpoint)
        except TimeoutError:
            return False
        return True

    async def settled(self, endpoint: ServerEndpoint) -> None:
        """Wait until a sync that is under way on this server has been decided.

        Raises RolloutError where that takes longer than two attempts may.
        """
        server = self._named(endpoint.name)
        limit_s = 2 * (self._config.deadline.sync_s + SUSPECT_S)
        try:
            async with asyncio.timeout(limit_s), self._changed:
                await self._changed.wait_for(
                    lambda: server.endpoint != endpoint or server.state != "syncing"
                )
        except TimeoutError:
            raise RolloutError(
                f"the weight sync of {server.name} was not decided within {limit_s:g} s"
            ) from None

    def is_routable(self, endpoint: ServerEndpoint) -> bool:
        """Whether requests may be sent to this very process now."""
        server = self._named(endpoint.name)
        return server.endpoint == endpoint and server.state == "routable"

    def _named(self, name: str) -> Server:
        return next(server for server in self._servers if server.name == name)

    def _candidates(self, version: int) -> list[Server]:
        if self._failure is not None:
            raise self._failure
        return [s for s in self._servers if s.state == "routable" and s.version == version]

    async def _resolve_doubt(self, server: Server) -> None:
        """Route to it again once it answers; kill it where it does not. `_watch` sees its end.

        A sync that began meanwhile decides instead: a server that is being written, or was refused,
        is paused and does not answer.
        """
        endpoint = server.endpoint
        try:
            answered = await self.answers(endpoint)
        finally:
            version = self._in_doubt.pop(endpoint)
            await self._notify()
        if server.endpoint != endpoint or server.state != "unsynced" or server.refusal:
            return
        if answered:
            server.become("routable", version)
            await self._notify()
        else:
            self.restart(server.name, endpoint.incarnation)

    async def _watch(self, server: Server) -> None:
        """Start `server` again whenever it ends, until it has no restart left."""
        while not self._is_closing:
            assert server.handle is not None
            status = await server.handle.wait()
            server.handle.kill()  # what it may have left in its process group
            await self._set(server, "dead")
            log.warning(
                "rollout server died server=%s incarnation=%d status=%d log=%s",
                server.name, server.endpoint.incarnation, status, server.log_path,
            )  # fmt: skip
            server.problem = server.problem or f"it ended with status {status}"
            while not await self._is_restarted(server):
                pass

    async def _is_restarted(self, server: Server) -> bool:
        assert self._starter is not None
        limit = self._starter.max_restarts
        if server.num_restarts >= limit:
            raise RolloutError(
                f"{server.name} failed again after launch.max_restarts={limit} restarts: "
                f"{server.problem}; the end of {server.log_path}:\n{log_end(server.log_path)}"
            )
        async with self._changed:
            await self._changed.wait_for(lambda: not self._holds_starts)
            self._num_starting += 1
        server.num_restarts += 1
        try:
            await self._bring_up(server, server.endpoint.incarnation + 1)
        except MegarlError as error:
            server.problem = str(error)
            return False
        finally:
            self._num_starting -= 1
            await self._notify()
        server.problem = ""
        await self._set(server, "unsynced")
        if self.on_restart is not None:
            self._in_background(self._rejoin(self.on_restart, server, server.endpoint))
        return True

    async def _rejoin(self, hook: RestartHook, server: Server, endpoint: ServerEndpoint) -> None:
        """Have the policy published to a restarted server; where that fails, start it once more."""
        try:
            await hook(endpoint)
        except MegarlError as error:
            log.warning("restarted server not synced server=%s error=%s", server.name, error)
            if server.endpoint == endpoint:
                server.problem = f"the policy could not be published to it: {error}"
                self.restart(server.name, endpoint.incarnation)

    async def _bring_up(self, server: Server, incarnation: int) -> None:
        assert self._starter is not None
        taken = {url_port(other.endpoint) for other in self._servers}
        await self._starter.bring_up(server, incarnation, taken)

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


async def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel the tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
