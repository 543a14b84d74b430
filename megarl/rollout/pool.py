"""The rollout servers of a run as processes: started, watched, restarted, ended.

Owns what follows a death, and what follows a doubt. Which server is asked for what is
`routing.py`'s, how weights reach it the weight sync's; knows nothing of prompts or rewards.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import aiohttp

from megarl.config.schema import Config
from megarl.errors import MegarlError, RolloutError
from megarl.linux import tree_rss_bytes
from megarl.nodes import Device, Seat
from megarl.rollout import calls, external
from megarl.rollout.external import Connector
from megarl.rollout.occupation import Occupation
from megarl.rollout.routing import SUSPECT_S, Routing
from megarl.rollout.server import Server, Spawn, Starter, log_end, own_servers, url_port
from megarl.rollout.tasks import all_or_none, cancelled
from megarl.types import ServerEndpoint

log = logging.getLogger(__name__)

RestartHook = Callable[[ServerEndpoint], Awaitable[None]]


class ServerPool(Routing):
    """`rollout.servers` SGLang servers, each at its seat; without seats on this machine's loopback.
    `run_dir/logs` gets the logs.

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
        seats: Sequence[Seat] = (),
    ) -> None:
        if config.rollout.urls:
            servers = external.servers(config, os.environ)
        else:
            servers = own_servers(config, seats)
        super().__init__(servers, config.deadline)
        self.on_restart: RestartHook | None = None
        self.occupation = Occupation(self.endpoints, lambda: self.http, self.end)
        self._config = config
        self._run_dir = run_dir
        self._spawn = spawn
        self._device: Device = device
        self._is_closing = False
        self._holds_starts = False
        self._num_starting = 0  # of restarts only
        self._in_doubt: dict[ServerEndpoint, int] = {}  # with the version it was routable at
        self._starter: Starter | Connector | None = None

    async def start(self) -> None:
        """Start all servers and wait until each is healthy; they are unsynced then.

        Raises ConfigError for a taken port or unusable arguments, RolloutError with the end of the
        log of the first server that fails or is late. The pool must be closed in any case.
        """
        self._starter = self._make_starter()
        await all_or_none(self._bring_up(server, 0) for server in self._servers)
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
        await cancelled(list(self._tasks))
        handles = [server.handle for server in self._servers if server.handle is not None]
        for handle in handles:
            handle.kill()
        await asyncio.gather(*(handle.wait() for handle in handles))
        for server in self._servers:
            await self._set(server, "dead")
        if self._starter is not None:
            await self._starter.http.close()

    @property
    def num_restarts(self) -> int:
        """How often servers were started again in this run."""
        return sum(server.num_restarts for server in self._servers)

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
    def rss_bytes(self) -> int:
        """Resident memory of all servers' processes on this machine."""
        handles = [server.handle for server in self._servers if server.handle is not None]
        return tree_rss_bytes([handle.pid for handle in handles])

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
                await calls.until(calls.is_healthy, self._starter.http, endpoint)
        except TimeoutError:
            return False
        return True

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
