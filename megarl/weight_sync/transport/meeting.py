"""How the members of one server's group find each other before each sync, over the learner's store.

Owns the keys of a meeting and the waits of it. Nobody builds or uses a group before all members are
there, so that what is missing is named; one that cannot go on says why, and nobody waits for it.
Knows nothing of groups but their names.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from megarl.errors import WeightSyncError

Result = TypeVar("Result")

_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class Call:
    """The call to one meeting: the store's address, the meeting's key, all members in order.

    `stands_key` is in the store for as long as the call stands; "" where the member need not ask.
    """

    store: tuple[str, int]
    key: str
    members: tuple[str, ...]
    stands_key: str = ""

    @property
    def refusal_key(self) -> str:
        """Where the first member that does not go on says why."""
        return f"{self.key}/refused"

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys that a meeting leaves in the store."""
        return (*(f"{self.key}/{i}" for i in range(len(self.members))), self.refusal_key)


def attend(store: TCPStore, call: Call, me: str, group: str, backend: str, until: float) -> str:
    """Say that `me` is here holding `group` ("" for none); returns the group that all will use.

    That is the one held where all hold the same, else the call's key: a new one. Raises
    WeightSyncError for a refusal, for a call that does not stand any more, for members of different
    backends, and naming who is missing when `until` passes.
    """
    _check_stands(store, call)  # first: what is over gets no more keys
    mine = json.dumps([group, backend])
    store.set(f"{call.key}/{call.members.index(me)}", mine)
    absent = dict(enumerate(call.members))
    said: dict[str, str] = {}
    while absent:
        if why := refusal(store, call):
            raise WeightSyncError(f"not begun: {why}")
        _check_stands(store, call)
        for number in [n for n in absent if store.check([f"{call.key}/{n}"])]:
            said[absent.pop(number)] = store.get(f"{call.key}/{number}").decode()
        if absent and time.monotonic() > until:
            raise WeightSyncError(
                f"{', '.join(absent.values())} did not come to the sync in time; see the logs of "
                "those processes, or raise deadline.sync_s"
            )
        if absent:
            time.sleep(_POLL_S)
    others = [name for name, text in said.items() if json.loads(text)[1] != backend]
    if others:
        raise WeightSyncError(
            f"{me} sends and receives by {backend}, {', '.join(others)} by another backend; "
            "run learner and servers both on GPUs or both on CPUs"
        )
    return group if group and set(said.values()) == {mine} else call.key


def _check_stands(store: TCPStore, call: Call) -> None:
    if call.stands_key and not store.check([call.stands_key]):
        raise WeightSyncError(
            "not begun: the sync that this update is of has ended; is an old update sent again?"
        )


def refuse(store: TCPStore, call: Call, why: str) -> None:
    """Tell the other members not to wait. The first refusal is kept."""
    store.compare_set(call.refusal_key, "", why)


def refusal(store: TCPStore, call: Call) -> str:
    """Why a member does not go on, or ""."""
    if not store.check([call.refusal_key]):
        return ""
    return str(store.get(call.refusal_key).decode())


def bounded(work: Callable[[], Result], until: float, what: str) -> Result:
    """The result of `work`, which is given up when `until` passes.

    For calls to a store, which wait for ever where its host has stopped or is cut off. The thread
    ends with the connection.
    """
    results: list[Result] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:  # noqa: BLE001 - raised in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, name="weight-sync-meeting", daemon=True)
    thread.start()
    thread.join(max(0.0, until - time.monotonic()))
    if errors:
        raise errors.pop()  # not kept here: with it goes all that its frames hold
    if not results:
        raise WeightSyncError(f"{what}: learner rank 0's store does not answer")
    return results[0]


def first_refusal(store: TCPStore, call: Call, me: str, until: float) -> str:
    """What the first member that gave up says, unless that is `me`; "" where nobody says."""
    try:
        why = bounded(lambda: refusal(store, call), until, me)
    except (WeightSyncError, RuntimeError):  # a dead store has nothing to add
        return ""
    return "" if why.startswith(f"{me}:") else why
