"""An HTTP server that answers as a test says, and remembers what it was asked."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megarl.types import ServerEndpoint

Asked = tuple[str, str, dict[str, Any], str]


class Web:
    """An HTTP server that remembers (method, path, body, key) and answers as `answers` says."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.answers: dict[str, Callable[[dict[str, Any]], tuple[int, str] | None]] = {}
        self.web = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self.web.daemon_threads = True
        self.web.owner = self  # type: ignore[attr-defined]
        self.thread = threading.Thread(target=self.web.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    @property
    def endpoint(self) -> ServerEndpoint:
        url = f"http://127.0.0.1:{self.web.server_port}"
        return ServerEndpoint("s", url, 1, 0, "user-key", "admin-key")

    @property
    def routes(self) -> list[str]:
        """What was asked, in order; a pause with its mode, a version with its label."""
        told = {"/pause_generation": "mode", "/update_weight_version": "new_version"}
        return [
            f"{path[1:].split('_')[0]} {body[told[path]]}" if path in told else path[1:]
            for _, path, body, _ in self.asked
        ]

    def close(self) -> None:
        self.web.shutdown()
        self.web.server_close()


class _Handler(BaseHTTPRequestHandler):
    def _answer(self) -> None:
        owner: Web = self.server.owner  # type: ignore[attr-defined]
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(raw) if raw else {}
        key = self.headers.get("Authorization", "").removeprefix("Bearer ")
        owner.asked.append((self.command, self.path, body, key))
        answer = owner.answers.get(self.path, lambda body: (200, "{}"))(body)
        if answer is None:
            self.close_connection = True
            return
        self.send_response(answer[0])
        self.send_header("Content-Length", str(len(answer[1])))
        self.end_headers()
        with contextlib.suppress(OSError):  # the caller has given up
            self.wfile.write(answer[1].encode())

    do_GET = do_POST = _answer

    def log_message(self, *_: object) -> None:
        """Says nothing."""
