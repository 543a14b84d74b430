"""One publish to one server: the calls to SGLang in order, its acknowledgements, the verdict.

Owns the order of a sync. Knows nothing of learner ranks or of how bytes travel. Nothing that a
server does or leaves undone raises out of `publish_to` or waits past the deadline: it becomes the
error of that server's result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from megarl.errors import NoAnswerError, WeightSyncError, in_words
from megarl.reshard.layout import Piece
from megarl.types import ServerEndpoint, ServerSync
from megarl.weight_sync import coverage
from megarl.weight_sync.acks import Ack, AckBoard
from megarl.weight_sync.control import LOAD_FORMAT, ControlMessage, encode
from megarl.weight_sync.parcels import server_member
from megarl.weight_sync.probe import CHECKED, Probe, largest_difference
from megarl.weight_sync.server_calls import CLOSING_S, SHORTEST_S, PauseMode, ServerCalls

MARGIN_S = 5.0  # at most: ranks stop waiting for each other so long before the server is given up

Written = TypeVar("Written")
GetProbe = Callable[[float], Probe | None]
"""The learner's probe, awaited until a time of `time.monotonic`; None where there is none."""


@dataclass(frozen=True)
class Evidence:
    """What a server must prove: `pieces` by rank (`coverage.held`), `wanted` sums by tensor.

    The sums are still worked out when the server begins: they are awaited until a time of
    `time.monotonic`.
    """

    pieces: Mapping[int, Sequence[Piece]]
    wanted: Callable[[float], Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the publish to one server ended.

    `is_reading` says that a rank may still read the arenas: it was asked to, and has not answered.
    `moved_bytes` are those that its ranks say they took, `network_bytes` those that learner ranks
    say they sent it by network. `copy_s` and `check_s` are its slowest rank's, `verdict_s` the time
    from the ranks' answers to the verdict on them.
    """

    result: ServerSync
    is_reading: bool
    moved_bytes: int = 0
    network_bytes: int = 0
    copy_s: float = 0.0
    check_s: float = 0.0
    verdict_s: float = 0.0


def proved(server: ServerEndpoint, label: str, difference: float | None) -> ServerSync:
    """The result of a server that has the weights, which are called `label` there."""
    name, incarnation = server.name, server.incarnation
    return ServerSync(name, incarnation, True, probe_max_abs_logprob=difference, label=label)


def failed(server: ServerEndpoint, error: Exception) -> ServerSync:
    """The result of a server whose sync ended with `error`."""
    is_lost = isinstance(error, NoAnswerError)
    text = f"{server.name}: {in_words(error)}"
    return ServerSync(server.name, server.incarnation, False, text, is_lost=is_lost)


def late(server: ServerEndpoint) -> ServerSync:
    """The result of a server that has not come to an end."""
    return failed(server, NoAnswerError("no answer in time"))


def slowest(outcomes: Sequence[Outcome]) -> tuple[float, float, float]:
    """The largest `copy_s`, `check_s` and `verdict_s`; zeros of none."""
    times = [(one.copy_s, one.check_s, one.verdict_s) for one in outcomes] or [(0.0, 0.0, 0.0)]
    copy_s, check_s, verdict_s = (max(column) for column in zip(*times, strict=True))
    return copy_s, check_s, verdict_s


def transfer_until(until: float) -> float:
    """When ranks stop waiting for each other, so that what they say still arrives by `until`."""
    left = max(0.0, until - time.monotonic())
    return time.monotonic() + left - min(MARGIN_S, left / 4)


def hand_over(
    calls: ServerCalls,
    label: str,
    pause: PauseMode,
    write: Callable[[], Written],
    get_probe: Callable[[], Probe | None],
    *,
    in_session: bool = True,
    suspect: str = CHECKED,
) -> tuple[Written, float | None]:
    """The order of one sync of one server, whatever `write` does between opening and closing it.

    Pause, open, pause again, write (and prove what was written), close, label, resume, probe.
    Without `in_session` nothing is opened or closed; `suspect` is what to say of a probe that
    differs, `label` is of this publish alone. Returns what `write` did and the largest difference
    of the probe, None without one. Raises what went wrong first; the server is then left paused,
    and under no label that was committed for these weights: one that fails before the label keeps
    its old one, and one that fails after it loses its running requests, which may have tokens of
    the new weights.
    """
    if pause == "in_place":
        check_in_place(calls.info())
    calls.pause(pause)
    written = _in_session(calls, pause, write) if in_session else write()
    calls.set_version(label)  # before the resume, so that no token has the old label
    try:
        calls.resume()
        probe = get_probe()
        if probe is None:
            return written, None
        return written, largest_difference(probe, calls.score(probe.token_ids), suspect)
    except Exception as error:
        _take_back(calls, label, error)
        raise


def _in_session(calls: ServerCalls, pause: PauseMode, write: Callable[[], Written]) -> Written:
    """`write` in a session, while nothing is generated.

    The second pause is for a server that another learner has resumed since the first; one that is
    still at it is known to the receiver, which then refuses.
    """
    calls.begin()
    try:
        calls.pause("retract" if pause == "abort" else pause)
        written = write()
    except Exception:
        with suppress(WeightSyncError):  # the first error is the one to tell
            calls.end()
        raise
    calls.end()
    return written


def check_in_place(server: Mapping[str, Any]) -> None:
    """Raise WeightSyncError where a server may not keep its KV cache over a sync.

    >>> check_in_place({"disable_radix_cache": True, "disable_overlap_schedule": True})
    """
    missing = [
        name for name in ("disable_radix_cache", "disable_overlap_schedule") if not server.get(name)
    ]
    if missing:
        raise WeightSyncError(
            f"weight_sync.pause = in_place, and the server runs without {' and '.join(missing)}: "
            "new requests would use keys and values of old weights, or tokens of the old weights "
            "get the new version; start it with them, or use weight_sync.pause = retract"
        )


def _take_back(calls: ServerCalls, label: str, why: Exception) -> None:
    """Stop a server that was resumed too early: its requests end, and its label names no version.

    Raises NoAnswerError where that fails too: such a server can only be started anew.
    """
    try:
        calls.pause("abort", at_least_s=CLOSING_S)
        calls.set_version(f"{label}-refused", at_least_s=CLOSING_S)
    except WeightSyncError as worse:
        raise NoAnswerError(f"{in_words(why)}; nor could it be paused again: {worse}") from why


def publish_to(
    server: ServerEndpoint,
    messages: Sequence[ControlMessage],
    evidence: Evidence,
    board: AckBoard,
    until: float,
    senders: Mapping[str, str],
    pause: PauseMode = "retract",
    get_probe: GetProbe = lambda until: None,
) -> Outcome:
    """Bring one server to the messages' version and see whether it got there.

    `messages` has one entry for each TP rank in order; `senders` are the keys under which learner
    ranks say how their own messages to it went. `until` is a time of `time.monotonic`.
    """
    calls = ServerCalls(server, until)
    ranks = {server_member(message.tp_rank): message.ack_key for message in messages}
    keys = {**ranks, **senders}
    reading, verdict_s = False, 0.0
    board.put(messages[0].busy_key, server.name)

    def write() -> dict[str, Ack]:
        nonlocal reading, verdict_s
        reading = True
        acks = _transfer(calls, messages, board, keys, until, flush=pause != "in_place")
        reading, answered = False, time.monotonic()
        _judge(acks, len(messages), evidence, until)
        verdict_s = time.monotonic() - answered
        return acks

    try:
        acks, difference = hand_over(
            calls, messages[0].stamp, pause, write, lambda: get_probe(until)
        )
    except Exception as error:  # noqa: BLE001 - one bad server does not spoil the others
        result = failed(server, error)
        if senders:
            board.put(messages[0].call.refusal_key, result.error)  # nobody waits for it any more
            refused = _refusals(board.said(keys))
            if refused and coverage.describe(refused) not in result.error:
                text = f"{result.error} ({coverage.describe(refused)})"
                result = replace(result, error=text)
        return Outcome(result, reading)
    finally:
        calls.close()
        board.forget([messages[0].busy_key])
    return Outcome(
        proved(server, messages[0].stamp, difference),
        reading,
        moved_bytes=sum(sum(acks[who].moved_bytes.values()) for who in ranks),
        network_bytes=sum(acks[who].moved_bytes.get("network", 0) for who in senders),
        copy_s=max(acks[who].copy_s for who in ranks),
        check_s=max(acks[who].check_s for who in ranks),
        verdict_s=verdict_s,
    )


def _transfer(
    calls: ServerCalls,
    messages: Sequence[ControlMessage],
    board: AckBoard,
    keys: Mapping[str, str],
    until: float,
    flush: bool,
) -> dict[str, Ack]:
    """Have the ranks copy and sum; what they say counts, never the answer to the request."""
    wait_s = max(SHORTEST_S, transfer_until(until) - time.monotonic())
    calls.update(
        {
            "serialized_named_tensors": [
                encode(replace(message, wait_s=wait_s)) for message in messages
            ],
            "load_format": LOAD_FORMAT,
            "flush_cache": flush,
        }
    )
    return board.wait(keys, messages[0].token, until)


def _refusals(acks: Mapping[str, Ack]) -> list[str]:
    return [f"{who}: {ack.error}" for who, ack in acks.items() if not ack.ok]


def _judge(acks: Mapping[str, Ack], tp: int, evidence: Evidence, until: float) -> None:
    refused = _refusals(acks)
    if refused:
        raise WeightSyncError("refused by " + coverage.describe(refused))
    sums = {rank: acks[server_member(rank)].sums for rank in range(tp)}
    wrong = coverage.differences(evidence.pieces, sums, evidence.wanted(until))
    if wrong:
        raise WeightSyncError(f"checksums differ: {coverage.describe(wrong)}")
