"""Reports put together, of several modes or of two attempts: each number of each stays in."""

from __future__ import annotations

import dataclasses

import pytest

from megarl.controller import publisher
from megarl.types import QuantizationError, ServerEndpoint, ServerSync, SyncReport, SyncTimes
from megarl.weight_sync import modes

TIMES = SyncTimes(stage_s=1.0, sums_s=2.0, copy_s=3.0, check_s=4.0, verdict_s=5.0)
LOST = QuantizationError(largest=0.02, mean=0.01, worst="model.layers.3")
SERVER = ServerEndpoint("server-0", "http://127.0.0.1:1", tp=1, incarnation=0)
RESULT = ServerSync("server-0", 0, verified=True)
FULL = SyncReport(
    version=7,
    servers=(RESULT,),
    moved_bytes=100,
    minimum_bytes=90,
    took_s=6.0,
    network_bytes=80,
    quantization=LOST,
    times=TIMES,
)
EMPTY = SyncReport(version=7, servers=(), moved_bytes=0, minimum_bytes=0, took_s=0.0)


def test_full_report_has_no_field_left_at_its_default() -> None:
    for value in (FULL, TIMES):
        for field in dataclasses.fields(value):
            assert getattr(value, field.name) not in (field.default, 0, ()), field.name


@pytest.mark.parametrize("reports", [(EMPTY, FULL), (FULL, EMPTY)], ids=["last", "first"])
def test_report_of_modes_keeps_all_that_one_mode_tells(reports: tuple[SyncReport, ...]) -> None:
    found = modes.merged(7, [SERVER], reports)
    assert found == dataclasses.replace(FULL, took_s=0.0)


def test_report_of_modes_adds_up_those_of_two() -> None:
    found = modes.merged(7, [SERVER], (FULL, FULL))
    assert (found.moved_bytes, found.minimum_bytes, found.network_bytes) == (200, 180, 160)
    assert found.times == SyncTimes(2.0, 4.0, 6.0, 8.0, 10.0)
    assert found.quantization == LOST


def test_report_of_two_attempts_keeps_all_that_the_first_tells() -> None:
    assert publisher.merged(FULL, EMPTY) == FULL
