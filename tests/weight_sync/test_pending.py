"""Values that are awaited while they are still worked out."""

from __future__ import annotations

import threading
import time

import pytest

from megarl.errors import WeightSyncError
from megarl.weight_sync.order import Summed, added_up
from megarl.weight_sync.pending import Pending
from megarl.weight_sync.together import settle_sums


def test_value_that_comes_later_reaches_all_who_wait() -> None:
    pending: Pending[int] = Pending("count")
    found: list[int] = []
    until = time.monotonic() + 30
    threads = [threading.Thread(target=lambda: found.append(pending.wait(until))) for _ in "ab"]
    for thread in threads:
        thread.start()
    pending.settle(7)
    for thread in threads:
        thread.join(30)
    assert found == [7, 7]


def test_value_that_does_not_come_in_time_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(WeightSyncError, match="did not count within .* deadline.sync_s$"):
        Pending[int]("count").wait(time.monotonic() + 0.05)
    with pytest.raises(WeightSyncError, match="deadline.sync_s, or set count = 0$"):
        Pending[int]("count", "set count = 0").wait(0.0)


def test_reason_why_there_is_none_is_told_to_those_who_wait() -> None:
    pending: Pending[int] = Pending("count")
    pending.settle(0, "rank 3 cannot count")
    with pytest.raises(WeightSyncError, match="rank 3 cannot count"):
        pending.wait(0.0)
    assert pending.error == "rank 3 cannot count"


def test_sums_of_ranks_are_added_and_all_errors_are_told() -> None:
    top = (1 << 64) - 1
    parts = [Summed({"w": top}, 1.0), Summed({"w": 2}, 3.0, "b"), Summed({}, 2.0, "c")]
    assert added_up(parts) == Summed({"w": 1}, 3.0, "b; c")


def test_rank_that_cannot_sum_is_named_to_those_who_judge_servers() -> None:
    def work() -> dict[str, int]:
        raise WeightSyncError("w is not finite")

    pending: Pending[Summed] = Pending("sum their weights")
    settle_sums(None, 3, work, pending)
    with pytest.raises(WeightSyncError, match="learner rank 3: w is not finite"):
        pending.wait(0.0)
    settle_sums(None, 3, lambda: {"w": 5}, pending)
    assert pending.wait(0.0).sums == {"w": 5}
