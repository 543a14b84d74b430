"""Acknowledgements: what counts as one, and how long the others are waited for."""

from __future__ import annotations

import socket
import time
from dataclasses import replace

import pytest

from megarl.errors import WeightSyncError
from megarl.weight_sync.acks import Ack, AckBoard
from megarl.weight_sync.transport import stores

GOOD = Ack("t", True, sums=(1, 2**64 - 1))
KEYS = {"TP rank 0": "a", "learner rank 1": "b"}


@pytest.fixture
def board() -> AckBoard:
    return AckBoard("127.0.0.1")


def wait(board: AckBoard, limit_s: float = 30.0) -> dict[str, Ack]:
    return board.wait(KEYS, "t", time.monotonic() + limit_s)


def test_acknowledgements_come_back_as_they_were_given(board: AckBoard) -> None:
    for key in KEYS.values():
        board.put(key, GOOD.to_json())
    assert wait(board) == dict.fromkeys(KEYS, GOOD)


def test_one_who_says_nothing_is_named_at_the_deadline(board: AckBoard) -> None:
    board.put("a", GOOD.to_json())
    with pytest.raises(WeightSyncError, match="no acknowledgement from learner rank 1 within"):
        wait(board, 0.1)


def test_one_who_says_nothing_is_not_waited_for_once_another_refuses(board: AckBoard) -> None:
    board.put("a", replace(GOOD, ok=False, error="learner rank 1 has ended").to_json())
    start = time.monotonic()
    with pytest.raises(WeightSyncError, match="rank 1 has ended; nothing was heard from learner"):
        wait(board)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("text", ["\x00{", "[]", "{}", '{"token": "t", "sums": 3}'])
def test_bytes_that_are_no_acknowledgement_are_a_refusal(board: AckBoard, text: str) -> None:
    board.put("a", text)
    assert not board.said(KEYS)["TP rank 0"].ok
    with pytest.raises(WeightSyncError, match="TP rank 0: .* is no acknowledgement"):
        wait(board)


def test_acknowledgement_with_another_token_is_a_refusal(board: AckBoard) -> None:
    board.put("a", replace(GOOD, token="of another").to_json())
    with pytest.raises(WeightSyncError, match="TP rank 0: acknowledged with a token that was not"):
        wait(board)


def test_connection_to_a_learner_that_has_ended_fails_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = ("127.0.0.1", taken.getsockname()[1])
    start = time.monotonic()
    with pytest.raises(WeightSyncError, match=f"no store at 127.0.0.1:{address[1]}, the learner"):
        stores.connect(address)
    assert time.monotonic() - start < 2
