"""One HTTP connection to a server, kept from call to call of a sync and made anew where it is gone.

A sync waits for each of its calls in turn, so that what a call costs its sender counts: this is
Python's own HTTP, which takes a third of what `requests` does. Owns nothing but the connection:
knows neither routes nor keys.
"""

from __future__ import annotations

import select
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

JSON = {"Content-Type": "application/json"}


class Connection:
    """To `url`, over no proxy: these are processes of one job."""

    def __init__(self, url: str) -> None:
        at = urlsplit(url)
        kind = HTTPSConnection if at.scheme == "https" else HTTPConnection
        self._to = kind(at.hostname or "", at.port)
        self._path = at.path.rstrip("/")

    def call(
        self,
        method: str,
        route: str,
        body: bytes | None,
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> tuple[int, str]:
        """Status and text of an answer. No send or receive takes longer than `timeout_s`.

        Raises TimeoutError where one does, OSError or HTTPException where there is no answer. The
        connection is then dropped, and the next call makes a new one.
        """
        self._leave_dead()
        self._to.timeout = timeout_s
        if self._to.sock is not None:
            self._to.sock.settimeout(timeout_s)
        told = {**headers, **(JSON if body is not None else {})}
        try:
            self._to.request(method, self._path + route, body, told)
            answer = self._to.getresponse()
            return answer.status, answer.read().decode("utf-8", "replace")
        except (OSError, HTTPException):
            self._to.close()
            raise

    def _leave_dead(self) -> None:
        """Drop a connection that the server has closed meanwhile: nobody else speaks unasked."""
        if self._to.sock is not None and select.select([self._to.sock], [], [], 0)[0]:
            self._to.close()

    def close(self) -> None:
        """Drop the connection."""
        self._to.close()
