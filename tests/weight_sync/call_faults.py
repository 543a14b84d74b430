"""What goes wrong around a call to a fake server: its HTTP side, ranks, arenas, the store.

A fault strikes once, before or after the call of one route is carried out.
"""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from megarl.weight_sync.acks import Ack
from megarl.weight_sync.control import ControlMessage, decode, encode
from megarl.weight_sync.transport import shared
from megarl.weight_sync.transport.shared import HEADER_BYTES
from tests.weight_sync.fake_server import Answer, NoAnswer, Server
from tests.weight_sync.forked import Learner

SLOW_S = 0.2


@dataclass
class Site:
    """What a fault may hurt. `rank` is of the learner or of the server, counted around."""

    server: Server
    learner: Learner
    rank: int
    at: int
    released: threading.Event
    again: Callable[[], None] = lambda: None

    def strike_learner(self, number: signal.Signals) -> None:
        """Send a signal to one of the learner's ranks."""
        _send(self.learner.ranks.processes, self.rank, number)

    def strike_server(self, number: signal.Signals) -> None:
        """Send a signal to one of the server's ranks."""
        _send(self.server.ranks.processes, self.rank, number)

    def arenas(self) -> list[Path]:
        """The learner's arenas, by name, and its parameters where they are shared."""
        return sorted(shared.FOLDER / name for name in self.learner.shared)

    def arena(self) -> Path | None:
        """One of them."""
        found = self.arenas()
        return found[self.rank % len(found)] if found else None


Action = Callable[[Site, dict[str, Any]], "Answer | None"]


def strike(site: Site, action: Action, route: str, when: str) -> None:
    """Have `action` happen at the first such call to the site's server."""
    once = threading.Lock()

    def hook(called: str, moment: str, body: dict[str, Any]) -> Answer | None:
        if called == route and moment == when and once.acquire(blocking=False):
            return action(site, body)
        return None

    site.server.hook = hook


def message_of(payload: str) -> ControlMessage:
    """The control message in one entry of an update's body."""
    return decode(pickle.loads(base64.b64decode(payload)))


def _error(site: Site, body: dict[str, Any]) -> Answer | None:
    return 500, "no"


def _drop(site: Site, body: dict[str, Any]) -> Answer | None:
    raise NoAnswer


def _slow(site: Site, body: dict[str, Any]) -> Answer | None:
    time.sleep(SLOW_S)
    return None


def _hang(site: Site, body: dict[str, Any]) -> Answer | None:
    """Hold the call; it is carried out after the sender has given up."""
    site.released.wait()
    return None


def _die(site: Site, body: dict[str, Any]) -> Answer | None:
    site.server.die()
    raise NoAnswer


def _reboot(site: Site, body: dict[str, Any]) -> Answer | None:
    site.server.reboot()
    return None


def _signal(whose: str, number: signal.Signals) -> Action:
    def act(site: Site, body: dict[str, Any]) -> Answer | None:
        (site.strike_learner if whose == "learner" else site.strike_server)(number)
        return None

    return act


def _flip(site: Site, body: dict[str, Any]) -> Answer | None:
    if path := site.arena():
        with path.open("r+b") as file:
            at = HEADER_BYTES + (site.at * 4099) % (path.stat().st_size - HEADER_BYTES)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << site.at % 8]))
    return None


def _header(at: int, text: bytes) -> Action:
    def act(site: Site, body: dict[str, Any]) -> Answer | None:
        if path := site.arena():
            with path.open("r+b") as file:
                file.seek(at)
                file.write(text)
        return None

    return act


def _truncate(site: Site, body: dict[str, Any]) -> Answer | None:
    path = site.arena()
    if path and "_live_" not in path.name:  # it would end the learner as well
        os.truncate(path, HEADER_BYTES + (path.stat().st_size - HEADER_BYTES) // 2)
    return None


def _unlink(site: Site, body: dict[str, Any]) -> Answer | None:
    if path := site.arena():
        path.unlink()
    return None


def _swap_files(site: Site, body: dict[str, Any]) -> Answer | None:
    found = site.arenas()
    if len(found) > 1:
        aside = found[0].with_name(f"{found[0].name}.aside")
        found[0].rename(aside)
        found[1].rename(found[0])
        aside.rename(found[1])
    return None


def _swap_refs(site: Site, body: dict[str, Any]) -> Answer | None:
    """Every rank is told of the arenas of two learner ranks in each other's place."""
    _change_messages(body, lambda message: replace(message, arenas=_rotated(message)))
    return None


def _rotated(message: ControlMessage) -> dict[int, Any]:
    ranks = list(message.arenas)
    return {rank: message.arenas[ranks[(i + 1) % len(ranks)]] for i, rank in enumerate(ranks)}


def _swap_payloads(site: Site, body: dict[str, Any]) -> Answer | None:
    """Two ranks get each other's message."""
    body["serialized_named_tensors"] = body["serialized_named_tensors"][::-1]
    return None


def _change_messages(
    body: dict[str, Any], change: Callable[[ControlMessage], ControlMessage]
) -> None:
    payloads = body.get("serialized_named_tensors", [])
    body["serialized_named_tensors"] = [encode(change(message_of(p))) for p in payloads]


def _store(message: ControlMessage) -> TCPStore:
    return TCPStore(*message.store, is_master=False, timeout=timedelta(seconds=5))


def _forge(site: Site, body: dict[str, Any]) -> Answer | None:
    """Another process says that a rank has done all."""
    messages = [message_of(payload) for payload in body["serialized_named_tensors"]]
    message = messages[site.rank % len(messages)]
    _store(message).set(message.ack_key, Ack("f" * 32, True).to_json())
    return None


def _garble(site: Site, body: dict[str, Any]) -> Answer | None:
    """What a rank has said is overwritten by bytes that mean nothing."""
    message = message_of(body["serialized_named_tensors"][0])
    _store(message).set(message.ack_key, "\x00{")
    return None


def _lose(site: Site, body: dict[str, Any]) -> Answer | None:
    """What a rank has said is lost."""
    messages = [message_of(payload) for payload in body["serialized_named_tensors"]]
    message = messages[site.rank % len(messages)]
    _store(message).delete_key(message.ack_key)
    return None


def _replay(site: Site, body: dict[str, Any]) -> Answer | None:
    """The update of an earlier attempt comes once more, while a session is open."""
    old = site.server.payloads[:-1] or site.server.payloads
    if old:
        site.server.deliver(old[site.at % len(old)])
    return None


def _twice(site: Site, body: dict[str, Any]) -> Answer | None:
    """The update is delivered twice."""
    site.server.deliver(body["serialized_named_tensors"])
    return None


def _poison(site: Site, body: dict[str, Any]) -> Answer | None:
    """A live weight of every copy changes after it was acknowledged."""
    site.server.poison(site.at)
    return None


def _second(site: Site, body: dict[str, Any]) -> Answer | None:
    """Another learner publishes to the same server, from now on."""
    site.again()
    time.sleep(SLOW_S * (site.at % 4) / 3)
    return None


ACTIONS: dict[str, Action] = {
    "error": _error,
    "no answer": _drop,
    "slow call": _slow,
    "call hangs": _hang,
    "server dies": _die,
    "server rebooted": _reboot,
    "learner rank killed": _signal("learner", signal.SIGKILL),
    "learner rank stopped": _signal("learner", signal.SIGSTOP),
    "server rank killed": _signal("server", signal.SIGKILL),
    "server rank stopped": _signal("server", signal.SIGSTOP),
    "arena bit flipped": _flip,
    "arena stamp stale": _header(shared._STAMP_AT, b"0.stale".ljust(64, b"\0")),
    "arena nonce wrong": _header(8, b"0" * 32),
    "arena truncated": _truncate,
    "arena gone": _unlink,
    "arena files swapped": _swap_files,
    "arena refs swapped": _swap_refs,
    "payloads swapped": _swap_payloads,
    "ack forged": _forge,
    "ack garbled": _garble,
    "ack lost": _lose,
    "old update replayed": _replay,
    "update delivered twice": _twice,
    "live weight poisoned": _poison,
    "second learner": _second,
}


def _send(processes: Sequence[BaseProcess], rank: int, number: signal.Signals) -> None:
    process = processes[rank % len(processes)]
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        os.kill(process.pid or 0, number)
    if number == signal.SIGKILL:
        process.join()


def cont(processes: Sequence[BaseProcess]) -> None:
    """Have stopped processes go on."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            if process.is_alive():
                os.kill(process.pid or 0, signal.SIGCONT)
