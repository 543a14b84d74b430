"""One publish to one server: the calls to SGLang in order, its acknowledgements, the verdict.

Owns the protocol. Knows nothing of learner ranks or of how bytes travel. Nothing that a server
does or leaves undone raises here or waits past the deadline: it becomes the error of that server's
result.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from megarl.errors import WeightSyncError, in_words
from megarl.reshard.layout import Piece
from megarl.types import ServerEndpoint, ServerSync
from megarl.weight_sync import coverage
from megarl.weight_sync.acks import Ack, AckBoard
from megarl.weight_sync.control import LOAD_FORMAT, ControlMessage, encode
from megarl.weight_sync.parcels import server_member
from megarl.weight_sync.server_calls import SHORTEST_S, ServerCalls

MARGIN_S = 5.0  # at most: ranks stop waiting for each other so long before the server is given up


@dataclass(frozen=True)
class Evidence:
    """What a server must prove: `pieces` by rank (`coverage.held`), `wanted` sums by tensor."""

    pieces: Mapping[int, Sequence[Piece]]
    wanted: Mapping[str, int]


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
    board.put(messages[0].busy_key, server.name)
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
        calls.set_version(str(messages[0].version))
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
        board.forget([messages[0].busy_key])


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
    wait_s = max(SHORTEST_S, transfer_until(until) - time.monotonic())
    calls.update(
        {
            "serialized_named_tensors": [
                encode(replace(message, wait_s=wait_s)) for message in messages
            ],
            "load_format": LOAD_FORMAT,
            "flush_cache": True,  # where requests are in the way, the answer is 400
        }
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
