"""One connection for many calls, against real sockets: kept while it lives, replaced when not."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.client import HTTPException

import pytest

from megarl.weight_sync.connection import Connection


class Peer:
    """Accepts connections; answers `per_connection` requests on each, then closes it.

    With 0 it closes a connection when the first request has come.
    """

    def __init__(self, per_connection: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._per_connection = per_connection
        self.requests: list[list[bytes]] = []
        self.closed = threading.Semaphore(0)
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            mine: list[bytes] = []
            self.requests.append(mine)
            with connection:
                for number in range(max(1, self._per_connection)):
                    found = self._one(connection)
                    if not found:
                        break
                    mine.append(found)
                    if self._per_connection:
                        text = f"answer {number}".encode()
                        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text)
                        connection.sendall(head + text)
            self.closed.release()

    def _one(self, connection: socket.socket) -> bytes:
        """A request with a body."""
        data = b""
        while b"\r\n\r\n" not in data:
            more = connection.recv(4096)
            if not more:
                return b""
            data += more
        head, _, body = data.partition(b"\r\n\r\n")
        size = next(
            int(line.split(b":")[1])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length")
        )
        while len(body) < size:
            body += connection.recv(4096)
        return head + b"\n\n" + body

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    made: list[Peer] = []
    yield made
    for peer in made:
        peer.close()


def _peer(peers: list[Peer], per_connection: int) -> Peer:
    peers.append(Peer(per_connection))
    return peers[-1]


def _post(to: Connection) -> tuple[int, str]:
    return to.call("POST", "/x", b'{"a": 1}', {"Authorization": "Bearer k"}, 10.0)


def test_calls_one_after_the_other_share_a_connection(peers: list[Peer]) -> None:
    peer = _peer(peers, 3)
    to = Connection(peer.url)
    assert [_post(to) for _ in range(3)] == [(200, f"answer {i}") for i in range(3)]
    (requests,) = peer.requests
    assert requests[0].startswith(b"POST /x HTTP/1.1") and requests[0].endswith(b'\n\n{"a": 1}')
    assert b"Authorization: Bearer k" in requests[0]
    assert b"Content-Type: application/json" in requests[0]


def test_connection_that_the_server_has_closed_is_made_anew(peers: list[Peer]) -> None:
    peer = _peer(peers, 1)
    to = Connection(peer.url)
    for _ in range(3):
        assert _post(to) == (200, "answer 0")
        assert peer.closed.acquire(timeout=10)
    assert [len(requests) for requests in peer.requests] == [1, 1, 1]


def test_request_that_gets_no_answer_is_not_sent_again(peers: list[Peer]) -> None:
    peer = _peer(peers, 0)
    to = Connection(peer.url)
    with pytest.raises((OSError, HTTPException)):
        _post(to)
    assert [len(requests) for requests in peer.requests] == [1]


def test_server_that_listens_and_says_nothing_is_waited_for_no_longer_than_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        to = Connection(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(TimeoutError):
            to.call("GET", "/x", None, {}, 0.2)
    with pytest.raises(ConnectionRefusedError):  # and the next call connects anew
        to.call("GET", "/x", None, {}, 0.2)
