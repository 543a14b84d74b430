"""What the rollout's tests share: a fake server for our own error handling, prompts, spawns."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from megarl.config.schema import Config
from megarl.nodes import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE
from megarl.rollout.pool import ServerPool
from megarl.types import Prompt, ServerEndpoint, ServerSync, SyncReport

Body = dict[str, Any]
Answer = Callable[["FakeServer", Body], Awaitable[web.StreamResponse]]


class NumberVocabulary:
    """Token ids as text; 2 ends a response, and a stop text is its own number."""

    eos_ids = (2,)

    def stop_id(self, text: str) -> int:
        return int(text)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(token_id) for token_id in ids)


def make_config(model: str | Path = "/nowhere", **groups: Any) -> Config:
    """A config for small tests; `groups` are settings by group."""
    rollout = {
        "samples_per_prompt": 4,
        "max_inflight_samples": 8,
        "sampling": {"max_new_tokens": 12},
        **groups.pop("rollout", {}),
    }
    return Config.model_validate(
        {
            "actor": {"model": str(model)},
            "learner": {"precision": {"params": "fp32"}},
            "rollout": rollout,
            "deadline": {"server_start_s": 300, "generate_s": 60, "sync_s": 30},
            **groups,
        }
    )


def make_prompts(count: int) -> list[Prompt]:
    """Prompts of different lengths and contents."""
    return [
        Prompt(f"p{i}", tuple(3 + (i * 7 + k) % 90 for k in range(4 + i % 5)), "", "")
        for i in range(count)
    ]


def verified(endpoints: Sequence[ServerEndpoint], version: int) -> SyncReport:
    """A report in which every endpoint proved `version`."""
    proofs = tuple(
        ServerSync(e.name, e.incarnation, verified=True, label=str(version)) for e in endpoints
    )
    return SyncReport(version, proofs, 0, 0, 0.0)


async def spawn(
    argv: Sequence[str], env: Mapping[str, str], name: str, log_path: Path
) -> RealHandle:
    """Start a real process, in its own session."""
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *argv,
            env={**os.environ, **env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return RealHandle(process)


class RealHandle:
    """A real process behind the pool's protocol."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    async def wait(self) -> int:
        return await self._process.wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


async def answer_well(server: FakeServer, body: Body) -> web.StreamResponse:
    """Three tokens for each sample, at the server's version, after a moment."""
    await asyncio.sleep(0.02)
    return web.json_response(good_reply(server, body))


def good_reply(server: FakeServer, body: Body, num_tokens: int = 3) -> list[Body]:
    """What SGLang 0.5.23 answers, without what megarl does not read."""
    ids = list(range(10, 10 + num_tokens))
    return [
        {
            "output_ids": ids,
            "meta_info": {
                "id": rid,
                "finish_reason": {"type": "length", "length": num_tokens},
                "output_token_logprobs": [[-0.5, token_id, None] for token_id in ids],
                "weight_versions": [
                    {"version": str(server.version), "start": 0, "end": num_tokens}
                ],
            },
        }
        for rid in body["rid"]
    ]


class FakeServer:
    """One incarnation of a server, inside this process: a port that answers as `fleet` says."""

    def __init__(self, fleet: Fleet, name: str, port: int, env: Mapping[str, str]) -> None:
        self.fleet, self.name, self.port = fleet, name, port
        self.api_key, self.admin_key = env[API_KEY_VARIABLE], env[ADMIN_KEY_VARIABLE]
        self.version: int | str = 0
        self.pid = 0
        self.requests: list[Body] = []
        self.aborted: list[str] = []
        self.inflight = self.most_inflight = 0
        self.is_healthy = True
        self.released: set[str] = set()
        self.memory_calls: list[str] = []
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._runner: web.AppRunner | None = None
        self._stops: list[asyncio.Task[None]] = []

    async def listen(self) -> None:
        app = web.Application()
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/health", self._ready)
        app.router.add_get("/model_info", self._info)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_post("/freeze_gc", self._freeze_gc)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/flush_cache", self._flush)
        app.router.add_post("/release_memory_occupation", self._release)
        app.router.add_post("/resume_memory_occupation", self._resume)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = int(self._runner.addresses[0][1])

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.is_healthy else 503)

    def _check(self, request: web.Request, key: str) -> None:
        if request.headers.get("Authorization") != f"Bearer {key}":
            raise web.HTTPUnauthorized

    async def _info(self, request: web.Request) -> web.Response:
        self._check(request, self.api_key)
        return web.json_response({"weight_version": str(self.version)})

    async def _server_info(self, request: web.Request) -> web.Response:
        self._check(request, self.api_key)
        return web.json_response({})

    async def _freeze_gc(self, request: web.Request) -> web.Response:
        self._check(request, self.admin_key)
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self._check(request, self.api_key)
        body = await request.json()
        self.requests.append(body)
        self.inflight += len(body["input_ids"])
        self.most_inflight = max(self.most_inflight, self.inflight)
        try:
            answer = self.fleet.answers.pop(0) if self.fleet.answers else answer_well
            return await answer(self, body)
        finally:
            self.inflight -= len(body["input_ids"])

    async def _abort(self, request: web.Request) -> web.Response:
        self._check(request, self.admin_key)
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    async def _flush(self, request: web.Request) -> web.Response:
        self._check(request, self.admin_key)
        self.memory_calls.append("flush")
        return web.Response(status=400 if self.inflight else 200)

    async def _release(self, request: web.Request) -> web.Response:
        tags = await self._tags(request, "release")
        if self.inflight:
            self.kill(1)  # SGLang asserts that it is idle
        self.released |= tags
        return web.Response()

    async def _resume(self, request: web.Request) -> web.Response:
        tags = await self._tags(request, "resume")
        if tags - self.released:
            self.kill(1)  # a KeyError in SGLang's scheduler
        self.released -= tags
        return web.Response()

    async def _tags(self, request: web.Request, call: str) -> set[str]:
        self._check(request, self.admin_key)
        tags = (await request.json())["tags"]
        self.memory_calls.append(f"{call} {' '.join(tags)}")
        return set(tags)

    async def wait(self) -> int:
        return await asyncio.shield(self._status)

    def kill(self, status: int = -9) -> None:
        if self._status.done():
            return
        self._status.set_result(status)
        if self._runner is not None:
            self._stops.append(asyncio.create_task(self._runner.cleanup()))


class Fleet:
    """Fake servers in the order of their start. `answers` are used up by requests, in their order.

    `failing_starts` servers end at once instead of listening.
    """

    def __init__(self) -> None:
        self.servers: list[FakeServer] = []
        self.answers: list[Answer] = []
        self.failing_starts = 0

    async def spawn(
        self, argv: Sequence[str], env: Mapping[str, str], name: str, log_path: Path
    ) -> FakeServer:
        server = FakeServer(self, name, int(argv[list(argv).index("--port") + 1]), env)
        self.servers.append(server)
        if self.failing_starts:
            self.failing_starts -= 1
            log_path.write_text("line 1\nno kernel image is available\n")
            server.kill(1)
        else:
            await server.listen()
        return server


@asynccontextmanager
async def fake_pool(tmp_path: Path, config: Config) -> AsyncIterator[tuple[ServerPool, Fleet]]:
    """A started pool of fake servers, verified at version 0."""
    fleet = Fleet()
    pool = ServerPool(config, tmp_path, fleet.spawn, "cpu")
    try:
        await pool.start()
        pool.mark_verified(verified(pool.endpoints(), 0))
        yield pool, fleet
    finally:
        await pool.aclose()
