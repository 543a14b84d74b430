"""What a server is before it is started, and what its log says of why it ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.nodes import Node, Seat
from megarl.rollout.server import has_lost_port, own_servers
from tests.rollout.running import make_config


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


def test_server_binds_to_the_address_of_its_seat_and_says_where_its_ranks_are() -> None:
    first = Seat((Node("a", "10.0.0.1", "a", 4, 4),), (2, 4))
    second = Seat((Node("b", "10.0.0.2", "b", 4, 0),), None)
    config = make_config(rollout={"servers": 2, "parallel": {"tp": 2}})
    servers = own_servers(config, [first, second])
    assert [server.host for server in servers] == ["10.0.0.1", "10.0.0.2"]
    assert [server.endpoint.nodes for server in servers] == [("a", "a"), ("b", "b")]
    assert [server.endpoint.gpus for server in servers] == [(2, 3), ()]


def test_servers_without_seats_are_on_this_machine() -> None:
    servers = own_servers(make_config(rollout={"servers": 2}), [])
    assert [server.host for server in servers] == ["127.0.0.1"] * 2
    assert [server.endpoint.nodes for server in servers] == [(), ()]
