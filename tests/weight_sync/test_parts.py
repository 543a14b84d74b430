"""Work that threads share: all of it is done once, and an error is not lost."""

from __future__ import annotations

import threading

import pytest

from megarl.weight_sync import parts


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("num_parts", [0, 1, 3, 500])
def test_every_part_is_carried_out_once_however_many_threads_share_them(
    threads: int, num_parts: int
) -> None:
    done: list[int] = []
    parts.run([lambda i=i: done.append(i) for i in range(num_parts)], threads)  # type: ignore[misc]
    assert sorted(done) == list(range(num_parts))
    assert not [t for t in threading.enumerate() if t.name == "weight-sync-part"]


def test_two_threads_work_at_the_same_time() -> None:
    meeting = threading.Barrier(2)
    parts.run([lambda: meeting.wait(10)] * 2, 2)  # one thread alone would wait for ever


@pytest.mark.parametrize("threads", [1, 3])
def test_error_of_any_part_is_raised_once_all_threads_have_ended(threads: int) -> None:
    def wrong() -> None:
        raise ValueError("part 2")

    with pytest.raises(ValueError, match="part 2"):
        parts.run([lambda: None, lambda: None, wrong, lambda: None], threads)
    assert not [t for t in threading.enumerate() if t.name == "weight-sync-part"]


def test_threads_are_no_more_than_the_cores_of_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for cores in ({3}, {0, 1}, set(range(64))):
        monkeypatch.setattr(parts.os, "sched_getaffinity", lambda _, cores=cores: cores)
        found.append(parts.num_threads())
    assert found == [1, 2, parts.MOST]
