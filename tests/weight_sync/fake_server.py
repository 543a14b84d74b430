"""A server whose ranks are `forked` processes: its HTTP side keeps SGLang's rules of a session.

Begin twice, end or update without begin is a 400; calls that change weights take turns in the
scheduler; paused generation is held. A `hook` may fail any call before or after it is carried out.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megarl.types import ServerEndpoint
from megarl.weight_sync.acks import Ack
from tests.weight_sync import tiny
from tests.weight_sync.faults import Fault
from tests.weight_sync.tiny import SHAPE

UPDATE = "/update_weights_from_tensor"
OPEN = "a weight-update session is already open; call end_weight_update() first"
CLOSED = "no weight-update session is open; call begin_weight_update() first"
OUTSIDE = (
    "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
)
HELD_S = 0.05  # between two looks at whether a caller of a paused server is still there
IS_GONE = "is_gone"  # in a body: a function that says so
UNNAMED = "default"  # the label of a server that nobody has named

Answer = tuple[int, str]
Hook = Callable[[str, str, dict[str, Any]], "Answer | None"]
"""(route, "before" | "after", body): an answer in the call's place, or None to go on."""


class NoAnswer(Exception):  # noqa: N818 - an event, not an error
    """The call gets no answer: its connection is closed."""


class Server:
    """A server's HTTP side, and its ranks on `nodes`, made by `start(tp)`."""

    def __init__(
        self, name: str, nodes: Sequence[str], start: Callable[[int], Any], gpus: Sequence[int] = ()
    ) -> None:
        self._start = start
        self.endpoint = ServerEndpoint(
            name, "", len(nodes), 0, nodes=tuple(nodes), gpus=tuple(gpus)
        )
        self.acks: list[Ack | None] = []
        self.payloads: list[list[str]] = []  # of all updates
        self.hook: Hook | None = None
        self._idle, self._num_calls = threading.Condition(), 0
        self._boot()
        self._listen()

    def _boot(self) -> None:
        self.faults: list[Fault | None] = [None] * self.endpoint.tp
        self.label, self.is_open, self.is_dead = UNNAMED, False, False
        self._scheduler, self._goes_on = threading.Lock(), threading.Event()
        self._goes_on.set()
        self.ranks = self._start(self.endpoint.tp)

    def _listen(self) -> None:
        self._web = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._web.daemon_threads = True
        self._web.owner = self  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._web.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        url = f"http://127.0.0.1:{self._web.server_port}"
        self.endpoint = replace(self.endpoint, url=url)

    @property
    def version(self) -> str:
        """What its weights are called, without what tells their publish from others."""
        return tiny.version_of(self.label)

    @property
    def is_paused(self) -> bool:
        """Whether generation is held."""
        return not self._goes_on.is_set()

    def restart(self) -> None:
        """Another incarnation, as the pool makes it of a server that it gave up."""
        self.reboot()
        self.endpoint = replace(self.endpoint, incarnation=self.endpoint.incarnation + 1)

    def reboot(self) -> None:
        """A new engine behind the same address, with weights of its own; nobody is told."""
        was_dead = self.is_dead
        self.ranks.kill()
        self._boot()
        if was_dead:
            self._listen()

    def die(self) -> None:
        """End ranks and HTTP side at once; nothing more is answered."""
        self.is_dead = True
        self.ranks.kill()
        self._goes_on.set()
        self._stop_listening()

    def _stop_listening(self) -> None:
        self._web.shutdown()
        self._web.server_close()
        self._thread.join()

    def close(self) -> None:
        """End everything."""
        if not self.is_dead:
            self.die()

    def handle(self, route: str, body: dict[str, Any]) -> Answer:
        """The answer to a call. Raises NoAnswer where there is none."""
        with self._idle:
            self._num_calls += 1
        try:
            return self._handle(route, body)
        finally:
            with self._idle:
                self._num_calls -= 1
                self._idle.notify_all()

    def _handle(self, route: str, body: dict[str, Any]) -> Answer:
        answer = self.hook(route, "before", body) if self.hook else None
        if answer is None:
            if self.is_dead:
                raise NoAnswer
            answer = self._carry_out(route, body)
            answer = (self.hook(route, "after", body) if self.hook else None) or answer
        if self.is_dead:
            raise NoAnswer
        return answer

    def _carry_out(self, route: str, body: dict[str, Any]) -> Answer:
        if route == "/pause_generation":
            self._goes_on.clear()
        elif route == "/continue_generation":
            self._goes_on.set()
        elif route == "/update_weight_version":
            self.label = body["new_version"]
        elif route == "/generate":
            return self._generate(body)
        elif route in ("/server_info", "/get_server_info", "/get_model_info"):
            return 200, json.dumps({"weight_version": self.label, "tp_size": self.endpoint.tp})
        else:
            with self._scheduler:
                return self._change_weights(route, body)
        return _said(True, "Success")

    def _change_weights(self, route: str, body: dict[str, Any]) -> Answer:
        if route == "/begin_weight_update":
            if self.is_open:
                return _said(False, OPEN)
            self.is_open = True
        elif route == "/end_weight_update":
            if not self.is_open:
                return _said(False, CLOSED)
            self.is_open = False
        elif route == UPDATE:
            if not self.is_open:
                return _said(False, OUTSIDE)
            self._load(body["serialized_named_tensors"], self.faults)
            self.payloads.append(body["serialized_named_tensors"])
        else:
            return 404, f"no route {route}"
        return _said(True, "Success")

    def deliver(self, payloads: list[str]) -> None:
        """Another update, from nobody knows where, which counts where a session is open."""
        with self._scheduler:
            if self.is_open:
                self._load(payloads, [None] * len(payloads))

    def _load(self, payloads: Sequence[str], faults: Sequence[Fault | None]) -> None:
        """Hand one payload to each rank's loader.

        Where that ends a rank the others are ended too, as SGLang does it; raises NoAnswer then.
        """
        ranks = self.ranks
        ranks.tell([("load", p, f) for p, f in zip(payloads, faults, strict=True)])
        acks = ranks.answers(all_or_none=True)
        if None in acks or ranks is not self.ranks:  # ended, or started anew meanwhile
            raise NoAnswer
        self.acks = acks

    def _generate(self, body: dict[str, Any]) -> Answer:
        """The log-probs of the prompt, which depend on every weight, unless the caller gives up."""
        ranks = self.ranks
        while not self._goes_on.wait(HELD_S):
            if body[IS_GONE]():
                raise NoAnswer
        if ranks is not self.ranks or self.is_dead:
            raise NoAnswer
        tokens, label = body["input_ids"], self.label
        logprobs = tiny.logprobs(self.fingerprint(), tokens)
        pairs = [[value, token, None] for value, token in zip(logprobs, tokens, strict=True)]
        meta = {"input_token_logprobs": pairs, "weight_version": label}
        return 200, json.dumps({"meta_info": meta, "output_ids": []})

    def poison(self, at: int) -> None:
        """Change one live weight of every rank."""
        with self._scheduler:
            self.ranks.ask(("poison", at))

    def fingerprint(self) -> int:
        """One number of all that the ranks hold."""
        with self._scheduler:
            sums = self.ranks.ask(("sums64",))
        if None in sums:
            raise NoAnswer
        return tiny.fingerprint_of_server(self.endpoint.tp, sums)

    def holds(self, seed: int) -> bool:
        """Whether every rank holds exactly its slices of the weights of `seed`."""
        wanted = tiny.on_server(SHAPE, self.endpoint.tp, tiny.weights(SHAPE, seed))
        return bool(
            self.ranks.ask(("sums",))
            == [{name: tiny.sha256(tensor) for name, tensor in mine.items()} for mine in wanted]
        )

    def drain(self, limit_s: float = 30.0) -> bool:
        """Wait until nothing is being carried out; whether that came."""
        with self._idle:
            return self._idle.wait_for(lambda: self._num_calls == 0, limit_s)


def _said(is_success: bool, message: str) -> Answer:
    return (200 if is_success else 400), json.dumps({"success": is_success, "message": message})


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def do_GET(self) -> None:
        self._answer({})

    def _answer(self, body: dict[str, Any]) -> None:
        owner: Server = self.server.owner  # type: ignore[attr-defined]
        if self.path == "/generate":
            body[IS_GONE] = self._is_gone
        try:
            status, text = owner.handle(self.path, body)
        except NoAnswer:
            self.close_connection = True
            return
        with contextlib.suppress(OSError):  # the caller has given up
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    def _is_gone(self) -> bool:
        """Whether the caller has closed the connection."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)

    def log_message(self, *_: object) -> None:
        """Says nothing."""
