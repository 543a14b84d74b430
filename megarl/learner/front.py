"""Rank 0's HTTP front: checks the key, queues verbs for the rank loop, answers, watches deadlines.

Runs in a thread of its own, beside the rank loop in the main thread. Knows nothing of torch, and
nothing of what a verb does.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from megarl.config.schema import DeadlineConfig
from megarl.errors import LearnerError, MegarlError
from megarl.learner.phases import describe_late, read_phases, write_json
from megarl.learner.verbs import VERBS_OF, Verb, deadline_s
from megarl.learner.wire import decode
from megarl.run_paths import LEARNER

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 30  # a batch by reference of a million samples is about 130 MB
_START_S = 30.0


@dataclass(slots=True, eq=False)
class Call:
    """One verb that was asked for; the rank loop sets `result` to the answer's JSON."""

    verb: Verb
    body: bytes
    sequence: int = 0
    result: Future[bytes] = field(default_factory=Future)


class Front:
    """The HTTP server of rank 0.

    `on_late(text)` is called once a verb's deadline has passed and the caller has been told; it is
    meant to end the process.
    """

    def __init__(
        self,
        deadlines: DeadlineConfig,
        logs: Path,
        world_size: int,
        on_late: Callable[[str], None],
        role: str = LEARNER,
    ) -> None:
        self.calls: queue.Queue[Call] = queue.Queue()
        self.api_key = secrets.token_urlsafe(32)
        self.url = ""
        self._deadlines = deadlines
        self._logs = logs
        self._world_size = world_size
        self._on_late = on_late
        self._role, self._verbs = role, VERBS_OF[role]
        self._running: Call | None = None
        self._open: set[Call] = set()
        self._started_at = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="front", daemon=True)

    def start(self, host: str, port: int) -> None:
        """Listen on `host`:`port` (0: a free one). Raises LearnerError where it cannot."""
        self._thread.start()
        try:
            self._call(self._listen(host, port)).result(_START_S)
        except OSError as error:
            raise LearnerError(
                f"the {self._role} cannot listen on {host}:{port}: {error.strerror}; "
                "set launch.learner_port to a free port, or to 0"
            ) from error

    def publish(self, endpoint: Path, pid: int) -> None:
        """Write where to find this service, for the owner's eyes only."""
        endpoint.parent.mkdir(parents=True, exist_ok=True)
        facts = {"url": self.url, "api_key": self.api_key, "pid": pid}
        write_json(endpoint, facts, mode=0o600)

    def begin(self, call: Call, sequence: int) -> None:
        """The rank loop starts `call` as verb number `sequence`: its deadline counts from now."""
        call.sequence = sequence
        self._started_at = time.monotonic()
        self._running = call
        limit_s = deadline_s(call.verb, self._deadlines)
        self._loop.call_soon_threadsafe(self._watch_over, call, limit_s)

    def answer(self, call: Call, body: bytes | None, error: str = "", kind: str = "") -> None:
        """The rank loop has ended `call`, with a result or an error."""
        self._running = None
        if call.result.done():
            return  # its deadline has passed
        if body is not None:
            call.result.set_result(body)
        else:
            call.result.set_exception(_VerbError(kind, error))

    def stop(self, reason: str, kind: str = "LearnerError") -> None:
        """Answer with an error what is still open, then close the port."""
        for call in tuple(self._open):
            self.answer(call, None, reason, kind)
        self._call(self._runner.cleanup()).result(_START_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_S)

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _listen(self, host: str, port: int) -> None:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._check_key])
        app.add_routes([web.get("/health", self._health), web.post("/verb/{name}", self._verb)])
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        self.url = f"http://{host}:{self._runner.addresses[0][1]}"

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.api_key}".encode()):
            return _error(401, "LearnerError", "wrong or missing API key")
        response: web.StreamResponse = await handler(request)
        return response

    async def _health(self, request: web.Request) -> web.Response:
        call = self._running
        if call is None:
            return web.json_response({"state": "idle"})
        running_s = time.monotonic() - self._started_at
        return web.json_response(
            {"state": "busy", "verb": call.verb.name, "running_s": round(running_s, 3)}
        )

    async def _verb(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        verb = self._verbs.get(name)
        if verb is None:
            known = ", ".join(self._verbs)
            return _error(404, "LearnerError", f"no verb {name!r}; there are {known}")
        body = await request.read()
        try:
            decode(verb.arguments, body)
        except MegarlError as error:
            return _error(400, type(error).__name__, f"{name}: {error}")
        call = Call(verb, body)
        self._open.add(call)
        self.calls.put(call)
        try:
            result = await asyncio.wrap_future(call.result)
        except _VerbError as failed:
            return _error(500, failed.kind, str(failed))
        finally:
            self._open.discard(call)
        return web.Response(body=result, content_type="application/json")

    def _watch_over(self, call: Call, limit_s: float) -> None:
        if self._watch is not None:
            self._watch.cancel()  # else every call would be kept until its deadline
        self._watch = self._loop.call_later(limit_s, self._late, call, limit_s)

    def _late(self, call: Call, limit_s: float) -> None:
        if self._running is not call or call.result.done():
            return
        late = describe_late(read_phases(self._logs, self._role), self._world_size, call.sequence)
        text = f"{call.verb.name} passed its deadline of {limit_s:.0f} s; not finished: {late}"
        log.error("verb late verb=%s deadline_s=%.0f", call.verb.name, limit_s)
        call.result.set_exception(_VerbError("LearnerError", text))
        self._loop.call_later(1.0, self._on_late, text)  # the answer leaves first


class _VerbError(Exception):
    """What the caller is told of a verb that failed: the error's class name and text."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def _error(status: int, kind: str, message: str) -> web.Response:
    return web.json_response({"error": kind, "message": message}, status=status)
