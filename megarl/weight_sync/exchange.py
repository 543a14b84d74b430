"""One publish to one server: the calls to SGLang in order, its acknowledgements, the verdict.

Owns the protocol. Knows nothing of learner ranks or of how bytes travel. Nothing that a server
does or leaves undone raises here or waits past the deadline: it becomes the error of that server's
result.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import requests

from megarl.errors import WeightSyncError, in_words
from megarl.reshard.layout import Piece
from megarl.types import ServerEndpoint, ServerSync
from megarl.weight_sync import coverage
from megarl.weight_sync.acks import Ack, AckBoard
from megarl.weight_sync.control import LOAD_FORMAT, ControlMessage, encode
from megarl.weight_sync.parcels import server_member

log = logging.getLogger(__name__)

SELECTOR = "target"  # a draft model is not the policy
_CLOSING_S = 5.0  # for ending a session after the deadline has passed
_SHORTEST_S = 0.05
MARGIN_S = 5.0  # at most: ranks stop waiting for each other so long before the server is given up


@dataclass(frozen=True)
class Evidence:
    """What a server must prove: `pieces` by rank (`coverage.held`), `wanted` sums by tensor."""

    pieces: Mapping[int, Sequence[Piece]]
    wanted: Mapping[str, int]


class ServerCalls:
    """HTTP calls to one server's control routes, each bounded by what is left until `until`."""

    def __init__(self, server: ServerEndpoint, until: float) -> None:
        self._server, self._until = server, until
        self._session = requests.Session()
        self._session.trust_env = False  # no proxy between the processes of one job
        key = server.admin_key or server.api_key
        if key:
            self._session.headers["Authorization"] = f"Bearer {key}"

    def post(self, route: str, body: Mapping[str, Any], at_least_s: float = 0.0) -> str:
        """The answer's text. Raises WeightSyncError for every answer but 200, and for none."""
        left = max(self._until - time.monotonic(), at_least_s)
        if left < _SHORTEST_S:
            raise WeightSyncError(f"the deadline passed before {route}; raise deadline.sync_s")
        try:
            answer = self._session.post(f"{self._server.url}{route}", json=body, timeout=left)
        except requests.Timeout as error:
            raise WeightSyncError(
                f"{route} did not answer within {left:.1f} s; see that server's log, or raise "
                "deadline.sync_s"
            ) from error
        except requests.RequestException as error:
            raise WeightSyncError(
                f"{route}: no answer, the server has ended or is unreachable ({error})"
            ) from error
        if answer.status_code != requests.codes.ok:
            raise WeightSyncError(f"{route} answered {answer.status_code}: {answer.text[:500]}")
        return answer.text

    def begin(self) -> None:
        """Open an update session; one that an earlier sender left open is ended first."""
        try:
            self.post("/begin_weight_update", {"selector": SELECTOR})
        except WeightSyncError as error:
            if "already open" not in str(error):
                raise
            log.warning("abandoned update session ended server=%s", self._server.name)
            self.end()
            self.post("/begin_weight_update", {"selector": SELECTOR})

    def end(self) -> None:
        """Close the update session, also when the deadline has passed: a server may serve again."""
        self.post("/end_weight_update", {}, at_least_s=_CLOSING_S)

    def close(self) -> None:
        """Drop the connection."""
        self._session.close()


def transfer_until(until: float) -> float:
    """When ranks stop waiting for each other, so that what they say still arrives by `until`."""
    left = max(0.0, until - time.monotonic())
    return time.monotonic() + left - min(MARGIN_S, left / 4)


def publish_to(
    server: ServerEndpoint,
    messages: Sequence[ControlMessage],
    evidence: Evidence,
    board: AckBoard,
    until: float,
    senders: Mapping[str, str],
) -> tuple[ServerSync, bool, int, int]:
    """Bring one server to the messages' version and see whether it got there.

    `messages` has one entry for each TP rank in order; `senders` are the keys under which learner
    ranks say how their own messages to it went. Also returns whether a rank may still be reading
    the arenas (it was asked to, and has not answered), the bytes that its ranks say they took, and
    those that learner ranks say they sent by network. `until` is a time of `time.monotonic`.
    """
    calls = ServerCalls(server, until)
    ranks = {server_member(message.tp_rank): message.ack_key for message in messages}
    reading = False
    try:
        calls.begin()
        try:
            reading = True
            acks = _transfer(calls, messages, board, {**ranks, **senders}, until)
            reading = False
            _judge(acks, len(messages), evidence)
        except Exception:
            with suppress(WeightSyncError):  # the first error is the one to tell
                calls.end()
            raise
        calls.end()
        calls.post("/update_weight_version", {"new_version": str(messages[0].version)})
        sent = sum(acks[who].moved_bytes.get("network", 0) for who in senders)
        taken = sum(sum(acks[who].moved_bytes.values()) for who in ranks)
        return ServerSync(server.name, server.incarnation, True), reading, taken, sent
    except Exception as error:  # noqa: BLE001 - one bad server does not spoil the others
        text = f"{server.name}: {in_words(error)}"
        if senders:
            _give_up(board, messages[0], text)
            refused = _refusals(board.said({**ranks, **senders}))
            if refused and coverage.describe(refused) not in text:
                text = f"{text} ({coverage.describe(refused)})"
        return ServerSync(server.name, server.incarnation, False, text), reading, 0, 0
    finally:
        calls.close()


def _give_up(board: AckBoard, message: ControlMessage, why: str) -> None:
    """Have nobody wait for this server any more: neither learner ranks nor its other ranks."""
    board.put(message.call.refusal_key, why)


def _transfer(
    calls: ServerCalls,
    messages: Sequence[ControlMessage],
    board: AckBoard,
    keys: Mapping[str, str],
    until: float,
) -> dict[str, Ack]:
    """Have the ranks copy and sum; what they say counts, never the answer to the request."""
    wait_s = max(_SHORTEST_S, transfer_until(until) - time.monotonic())
    calls.post(
        "/update_weights_from_tensor",
        {
            "serialized_named_tensors": [
                encode(replace(message, wait_s=wait_s)) for message in messages
            ],
            "load_format": LOAD_FORMAT,
            "selector": SELECTOR,
            "flush_cache": True,  # where requests are in the way, the answer is 400
        },
    )
    return board.wait(keys, messages[0].token, until)


def _refusals(acks: Mapping[str, Ack]) -> list[str]:
    return [f"{who}: {ack.error}" for who, ack in acks.items() if not ack.ok]


def _judge(acks: Mapping[str, Ack], tp: int, evidence: Evidence) -> None:
    refused = _refusals(acks)
    if refused:
        raise WeightSyncError("refused by " + coverage.describe(refused))
    sums = {rank: acks[server_member(rank)].sums for rank in range(tp)}
    wrong = coverage.differences(evidence.pieces, sums, evidence.wanted)
    if wrong:
        raise WeightSyncError(f"checksums differ: {coverage.describe(wrong)}")
