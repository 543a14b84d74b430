"""The memory ledger: what returns is fine, what does not is named."""

from __future__ import annotations

import pytest

from megarl.controller.memory import MIB, PARTS, MemoryLedger
from megarl.errors import DeviceMemoryError


def test_first_floor_is_no_baseline() -> None:
    ledger = MemoryLedger(tolerance_bytes=10 * MIB)
    for floor in (0, 500, 510, 400, 505):
        ledger.check({"learner_rss_bytes": floor * MIB}, servers="a")


@pytest.mark.parametrize("name", PARTS)
def test_part_that_does_not_return_ends_the_run_by_its_name(name: str) -> None:
    ledger = MemoryLedger(tolerance_bytes=10 * MIB)
    flat = dict.fromkeys(PARTS, 100 * MIB)
    ledger.check(flat, servers="a")
    ledger.check(flat, servers="a")
    ledger.check({**flat, name: 110 * MIB}, servers="a")
    with pytest.raises(DeviceMemoryError) as caught:
        ledger.check({**flat, name: 111 * MIB}, servers="a")
    text = str(caught.value)
    assert text.startswith(f"{PARTS[name]} did not return: 111 MiB")
    assert "100 MiB after the first cycle" in text
    assert f"({name}, placement.memory_tolerance_mib = 10)" in text


def test_growth_is_measured_from_the_first_cycle_and_not_from_the_one_before() -> None:
    ledger = MemoryLedger(tolerance_bytes=10 * MIB)
    for floor in (0, 100, 105, 110):
        ledger.check({"device_rest_bytes": floor * MIB}, servers="a")
    with pytest.raises(DeviceMemoryError, match="CUDA contexts and communicators"):
        ledger.check({"device_rest_bytes": 115 * MIB}, servers="a")


def test_server_that_was_started_anew_is_a_new_baseline() -> None:
    ledger = MemoryLedger(tolerance_bytes=10 * MIB)
    for floor, servers in ((0, "a"), (100, "a"), (300, "b"), (305, "b")):
        ledger.check({"servers_rss_bytes": floor * MIB}, servers=servers)
    with pytest.raises(DeviceMemoryError):
        ledger.check({"servers_rss_bytes": 311 * MIB}, servers="b")
