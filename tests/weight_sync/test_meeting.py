"""Members of a group find each other, or learn who is missing and why."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest

from megarl.errors import WeightSyncError
from megarl.weight_sync.acks import AckBoard
from megarl.weight_sync.transport import meeting, stores
from megarl.weight_sync.transport.meeting import Call
from megarl.weight_sync.transport.p2p import address_toward

MEMBERS = ("learner rank 0", "TP rank 0", "TP rank 1")


@pytest.fixture
def board() -> AckBoard:
    return AckBoard("127.0.0.1")


def gathered(
    board: AckBoard, held: list[str], backends: tuple[str, ...] = ("gloo",) * 3, limit_s: float = 5
) -> list[str]:
    """What each member that comes is told: a group, or an error."""
    call = Call(board.address, "k", MEMBERS)
    told = [""] * len(held)

    def attend(i: int) -> None:
        until = time.monotonic() + limit_s
        try:
            store = stores.connect(call.store)
            told[i] = meeting.attend(store, call, MEMBERS[i], held[i], backends[i], until)
        except WeightSyncError as error:
            told[i] = str(error)

    threads = [threading.Thread(target=attend, args=(i,)) for i in range(len(held))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


@pytest.mark.parametrize(
    ("held", "group"),
    [(["g", "g", "g"], "g"), (["", "", ""], "k"), (["g", "", "g"], "k"), (["g", "h", "g"], "k")],
    ids=["all hold it", "nobody holds one", "one has lost it", "one has another"],
)
def test_members_keep_a_group_that_all_hold_and_else_make_a_new_one(
    board: AckBoard, held: list[str], group: str
) -> None:
    assert gathered(board, held) == [group] * 3


def test_member_that_does_not_come_is_named_to_all_others(board: AckBoard) -> None:
    for text in gathered(board, ["", ""], limit_s=0.2):
        assert "TP rank 1 did not come to the sync in time" in text


def test_refusal_reaches_all_at_once_and_the_first_one_stays(board: AckBoard) -> None:
    call = Call(board.address, "k", MEMBERS)
    store = stores.connect(call.store)
    meeting.refuse(store, call, "TP rank 1: no room")
    meeting.refuse(store, call, "TP rank 0: because of the other")
    start = time.monotonic()
    assert gathered(board, ["", ""]) == ["not begun: TP rank 1: no room"] * 2
    assert time.monotonic() - start < 4
    board.clear()
    assert board.num_keys == 0


def test_member_that_comes_when_all_is_over_does_not_wait_and_leaves_no_key(
    board: AckBoard,
) -> None:
    call = Call(board.address, "k", MEMBERS, stands_key="k/busy")
    store = stores.connect(call.store)
    with pytest.raises(WeightSyncError, match="the sync that this update is of has ended"):
        meeting.attend(store, call, MEMBERS[1], "", "gloo", time.monotonic() + 60)
    assert board.num_keys == 0


def test_member_that_waits_learns_that_all_is_over(board: AckBoard) -> None:
    call = Call(board.address, "k", MEMBERS, stands_key="k/busy")
    board.put(call.stands_key, "server-0")
    store = stores.connect(call.store)
    timer = threading.Timer(0.2, board.forget, [[call.stands_key]])
    timer.start()
    with pytest.raises(WeightSyncError, match="the sync that this update is of has ended"):
        meeting.attend(store, call, MEMBERS[1], "", "gloo", time.monotonic() + 60)
    timer.join()


def test_members_on_gpus_and_on_cpus_do_not_wait_for_each_other(board: AckBoard) -> None:
    told = gathered(board, ["", "", ""], ("nccl", "gloo", "gloo"))
    assert all("both on GPUs or both on CPUs" in text for text in told)


def test_store_that_does_not_answer_is_given_up_in_time() -> None:
    release = threading.Event()
    hangs: Callable[[], bool] = release.wait
    start = time.monotonic()
    with pytest.raises(WeightSyncError, match="store does not answer"):
        meeting.bounded(hangs, start + 0.2, "TP rank 0")
    assert time.monotonic() - start < 4
    release.set()


def test_store_that_is_gone_has_no_refusal_to_tell() -> None:
    board = AckBoard("127.0.0.1")
    call = Call(board.address, "k", MEMBERS)
    store = stores.connect(call.store)
    meeting.refuse(store, call, "TP rank 1: its reasons")
    until = time.monotonic() + 30
    assert meeting.first_refusal(store, call, MEMBERS[0], until) == "TP rank 1: its reasons"
    assert meeting.first_refusal(store, call, "TP rank 1", until) == ""
    del board
    assert meeting.first_refusal(store, call, MEMBERS[0], until) == ""
    assert time.monotonic() < until - 5  # at once, not at the deadline


def test_address_is_that_of_the_interface_which_leads_to_the_store() -> None:
    assert address_toward("127.0.0.1") == "127.0.0.1"
    own = socket.gethostbyname(socket.gethostname())
    assert address_toward(own) == own
