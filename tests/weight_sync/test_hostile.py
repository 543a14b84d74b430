"""Whatever stands in a message, an acknowledgement or an arena's table: taken whole, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given

from megarl.errors import MegarlError, WeightSyncError
from megarl.weight_sync.acks import Ack
from megarl.weight_sync.control import ControlMessage
from megarl.weight_sync.server_calls import ServerCalls
from megarl.weight_sync.transport.cuda_ipc import Table
from megarl.weight_sync.transport.in_place import _read_table
from tests.hostile import SEEDED, deep, hurt
from tests.weight_sync.test_control import MESSAGE
from tests.weight_sync.test_server_calls import TOKENS

ACK = json.loads(Ack("t", True, sums=(1, 2**64 - 1), moved_bytes={"shm": 3}).to_json())
TABLE = ["GPU-1", "host", "ns", True, ["aGVsbG8="], [[0, 64, 0, 0]]]
PLACES = [{"name": "n", "num_bytes": 8, "nonce": "0", "host": "h"}, [[0, 8, 0]]]
SCORES = {"meta_info": {"input_token_logprobs": [[None, 5, None], [-1.0, 9, None], [-2, 7, None]]}}


@SEEDED
@given(hurt(ACK))
def test_any_acknowledgement_is_refused_or_says_yes_or_no_and_64_bit_sums(fields: Any) -> None:
    try:
        ack = Ack.from_json(json.dumps(fields))
    except WeightSyncError as error:
        assert "no acknowledgement" in str(error)
        return
    assert isinstance(ack.ok, bool)
    assert all(type(s) is int and 0 <= s < 2**64 for s in ack.sums)


@SEEDED
@given(hurt(json.loads(MESSAGE.to_json())))
def test_any_control_message_is_taken_or_refused_in_words(fields: Any) -> None:
    try:
        assert isinstance(ControlMessage.from_json(json.dumps(fields)), ControlMessage)
    except MegarlError as error:
        assert 0 < len(str(error)) < 5000


@SEEDED
@given(hurt(TABLE))
def test_any_table_of_gpu_memory_is_taken_or_refused(fields: Any) -> None:
    try:
        assert isinstance(Table.from_bytes(json.dumps(fields).encode()), Table)
    except WeightSyncError as error:
        assert "cannot be read" in str(error)


@SEEDED
@given(hurt(PLACES))
def test_any_table_of_a_learners_memory_is_taken_or_refused(fields: Any) -> None:
    try:
        _read_table(json.dumps(fields).encode())
    except WeightSyncError as error:
        assert "cannot be read" in str(error)


@pytest.mark.parametrize(
    "read", [Ack.from_json, ControlMessage.from_json, Table.from_bytes, _read_table]
)
def test_json_nested_too_deep_to_read_is_refused(read: Callable[[Any], object]) -> None:
    with pytest.raises(WeightSyncError):
        read(deep())


class Answering(ServerCalls):
    """Calls that get one answer, whatever is asked."""

    def __init__(self, text: str) -> None:
        self._text = text

    def _call(self, *_: object, **__: object) -> str:
        return self._text


@SEEDED
@given(hurt(SCORES))
def test_any_scores_are_finite_and_of_the_tokens_sent_or_refused(reply: Any) -> None:
    try:
        found = Answering(json.dumps(reply)).score(TOKENS)
    except WeightSyncError as error:
        assert len(str(error)) < 5000
        return
    assert len(found) == len(TOKENS) - 1
    assert all(type(logprob) is float and abs(logprob) < float("inf") for logprob in found)


def test_answer_nested_too_deep_to_read_names_its_route() -> None:
    with pytest.raises(WeightSyncError, match="/server_info did not answer with JSON"):
        Answering(deep()).info()
