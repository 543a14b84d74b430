"""One rollout server: its process, its state, and how it is brought up until it answers.

Owns what a launcher must offer (`Spawn`, `ProcessHandle`) and the way from a command to health.
Which server is asked for what, and what follows a death, is the pool's; knows nothing of weights or
prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

import aiohttp

from megarl import ports, run_paths
from megarl.config.schema import Config
from megarl.errors import RolloutError
from megarl.nodes import LOOPBACK, Device, Seat
from megarl.rollout import calls
from megarl.rollout.command import ServerPlace, server_command
from megarl.types import ServerEndpoint

State = Literal["starting", "unsynced", "syncing", "routable", "dead"]
PORT_TRIES = 3  # a port found free can be taken before the server binds it
PORT_RELEASE_S = 10.0  # how long the port of a server that was killed may stay taken
PORT_LOST = "address already in use"  # EADDRINUSE in the server's log; ZeroMQ has a capital A
LOG_LINES = 40


class ProcessHandle(Protocol):
    """A started process, the leader of its own process group."""

    @property
    def pid(self) -> int:
        """Its process id on this machine."""

    async def wait(self) -> int:
        """Its exit status, or minus the signal that ended it. Any number of tasks may wait."""

    def kill(self) -> None:
        """End its whole process group at once; no error where it has ended."""


class Spawn(Protocol):
    """Starts a process where server `name` belongs; `env` is added to the environment."""

    async def __call__(
        self, argv: Sequence[str], env: Mapping[str, str], name: str, log_path: Path
    ) -> ProcessHandle:
        """The started process, whose output goes to `log_path`. Raises LaunchError."""


@dataclass(slots=True)
class Server:
    """One server, over all its incarnations. `version` is what it is routable at, else -1."""

    index: int
    host: str
    endpoint: ServerEndpoint
    state: State = "starting"
    version: int = -1
    refusal: str = ""
    num_inflight: int = 0
    num_restarts: int = 0
    problem: str = ""
    handle: ProcessHandle | None = None
    log_path: Path = Path()

    @property
    def name(self) -> str:
        """Stays over restarts."""
        return self.endpoint.name

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked for anything."""
        return self.state in ("unsynced", "syncing", "routable")

    def become(self, state: State, version: int = -1, refusal: str = "") -> None:
        """Change state; what the former state carried is forgotten."""
        self.state, self.version, self.refusal = state, version, refusal

    def __str__(self) -> str:
        state = f"routable at version {self.version}" if self.state == "routable" else self.state
        refused = f" (refused: {self.refusal})" if self.refusal else ""
        return f"{self.name}, incarnation {self.endpoint.incarnation}, is {state}{refused}"


def own_servers(config: Config, seats: Sequence[Seat]) -> list[Server]:
    """Servers that the run starts, before they are; without seats on this machine's loopback."""
    count, parallel = config.rollout.servers, config.rollout.parallel
    assert len(seats) in (0, count), (seats, count)
    places: Sequence[Seat | None] = seats or [None] * count
    found = []
    for index, seat in enumerate(places):
        endpoint = ServerEndpoint(
            f"server-{index}",
            "",
            parallel.tp,
            0,
            nodes=(seat.nodes[0].name,) * parallel.tp if seat else (),
            gpus=tuple(range(*seat.gpus)) if seat and seat.gpus else (),
            ep=parallel.ep,
            attention_dp=parallel.attention_dp,
        )
        found.append(Server(index, seat.address if seat else LOOPBACK, endpoint))
    return found


@dataclass(frozen=True, slots=True)
class Starter:
    """Brings servers of one run up. `run_dir/logs` gets one log for each incarnation."""

    config: Config
    run_dir: Path
    spawn: Spawn
    device: Device
    api_key: str = field(repr=False)
    admin_key: str = field(repr=False)
    http: aiohttp.ClientSession

    @property
    def max_restarts(self) -> float:
        """How often one server is started again."""
        return self.config.launch.max_restarts

    async def bring_up(self, server: Server, incarnation: int, taken: Container[int]) -> None:
        """Start the process and wait for its health, on a port that is not in `taken`.

        Raises ConfigError for a port that is taken or arguments that cannot be used, LaunchError
        where there is no process, RolloutError with the end of the log where it ends or is late.
        """
        for tries_left in reversed(range(PORT_TRIES)):
            port = await self._port(server, incarnation, taken)
            await self._start(server, incarnation, port)
            try:
                await self._until_healthy(server)
                return
            except RolloutError:
                assert server.handle is not None
                await server.handle.wait()  # it was ended; until then it holds port and devices
                is_given = self.config.launch.rollout_port != 0
                if is_given or not tries_left or not has_lost_port(server.log_path):
                    raise

    async def _port(self, server: Server, incarnation: int, taken: Container[int]) -> int:
        first = self.config.launch.rollout_port
        if not first:
            return ports.free_port(server.host, taken)
        for _ in range(int(PORT_RELEASE_S / calls.POLL_S) if incarnation else 0):
            if ports.is_free(server.host, first + server.index):
                break
            await asyncio.sleep(calls.POLL_S)
        return ports.check_port(server.host, first + server.index, "launch.rollout_port")

    async def _start(self, server: Server, incarnation: int, port: int) -> None:
        server.become("starting")
        server.endpoint = replace(
            server.endpoint,
            url=f"http://{server.host}:{port}",
            incarnation=incarnation,
            api_key=self.api_key,
            admin_key=self.admin_key,
        )
        server.log_path = self.run_dir / run_paths.LOGS / f"{server.name}.{incarnation}.log"
        server.log_path.parent.mkdir(parents=True, exist_ok=True)
        place = ServerPlace(
            server.index, incarnation, server.host, port, self.api_key, self.admin_key
        )
        command = server_command(self.config, place, self.device)
        server.handle = await self.spawn(command.argv, command.env, server.name, server.log_path)

    async def _until_healthy(self, server: Server) -> None:
        assert server.handle is not None
        limit_s = self.config.deadline.server_start_s
        ended = asyncio.ensure_future(server.handle.wait())
        healthy = asyncio.ensure_future(self._answers(server.endpoint))
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.wait((ended, healthy), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise _not_up(
                server, f"was not healthy within deadline.server_start_s={limit_s:g} and is ended"
            ) from None
        finally:
            ended.cancel()
            healthy.cancel()
        if ended.done() and not ended.cancelled():
            raise _not_up(server, f"ended with status {ended.result()} before it was healthy")
        try:
            await healthy
        except RolloutError as error:
            raise _not_up(
                server, f"answers, but not as it should, and is ended: {error}"
            ) from error

    async def _answers(self, endpoint: ServerEndpoint) -> None:
        await calls.until(calls.is_ready, self.http, endpoint)
        await calls.until(calls.is_healthy, self.http, endpoint)
        await calls.model_info(self.http, endpoint)  # opened by its key, so it is ours
        await calls.freeze_gc(self.http, endpoint)


def _not_up(server: Server, what: str) -> RolloutError:
    assert server.handle is not None
    server.handle.kill()
    return RolloutError(
        f"{server.name} on {server.host} {what}; the end of {server.log_path}:\n"
        f"{log_end(server.log_path)}"
    )


def url_port(endpoint: ServerEndpoint) -> int:
    """The port in an endpoint's URL, 0 before it has one.

    >>> url_port(ServerEndpoint("server-0", "http://127.0.0.1:30000", tp=1, incarnation=0))
    30000
    """
    return int(endpoint.url.rpartition(":")[2] or 0)


def log_end(path: Path, num_lines: int = LOG_LINES) -> str:
    """The last lines of a log, or that there is none."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return f"(no log at {path})"
    return "\n".join(lines[-num_lines:]) or "(the log is empty)"


def has_lost_port(path: Path) -> bool:
    """Whether a server's log ends with one of its ports being taken.

    It has several: with data-parallel attention SGLang binds others at a fixed distance from the
    one it is given, which nobody has looked at before.
    """
    return PORT_LOST in log_end(path).lower()


def described(servers: Sequence[Server]) -> str:
    """Every server's state, for an error's text."""
    return "; ".join(str(server) for server in servers)
