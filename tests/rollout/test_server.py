"""What a server's log says of why it ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.rollout.server import has_lost_port


@pytest.mark.parametrize(
    ("end", "lost"),
    [
        ("[Errno 98] error while attempting to bind on address: address already in use", True),
        ("zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:28298')", True),
        ("RuntimeError: no space left", False),
    ],
)
def test_port_that_was_taken_is_told_from_other_ends(tmp_path: Path, end: str, lost: bool) -> None:
    log = tmp_path / "server.log"
    log.write_text(f"warming up\n{end}\n")
    assert has_lost_port(log) is lost
