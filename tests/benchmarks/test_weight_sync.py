"""What the benchmark of weight sync makes of its times, and that it counts what it says."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from benchmarks.sync import cases
from benchmarks.sync.counting import counted
from benchmarks.sync.measure import Counted, Measured, MemoryCopy, Sync
from benchmarks.sync.report import TARGETS, summary, table
from megarl.actor.shape import read_shape

KEYS = (*TARGETS, "rollout_stall_s")


def _sync(seconds: float) -> Sync:
    times = {"stage_s": 0.1, "sums_s": 0.3, "copy_s": 0.5, "check_s": 0.2, "verdict_s": 0.1}
    return Sync(10.0, 10.0 + seconds, 0.5, 0.25, {"times": times})


@pytest.fixture
def measured() -> Measured:
    return Measured(
        syncs=[_sync(1.0), _sync(9.0), _sync(1.5)],
        staged_syncs=[_sync(4.0)],
        probe_s=[0.25],
        stall_s=[0.5, 2.5, 0.75],
        stock_tensor_s=[30.0],
        stock_distributed_s=[3.0, 6.0],
        gather_s=[1.5],
        counted=Counted((100, 50), (70,), ("/pause_generation", "/continue_generation"), 4),
    )


def test_ratios_are_of_medians_and_what_staging_and_verdict_take_is_counted(
    tmp_path: Path, measured: Measured
) -> None:
    result = summary(cases.moe(tmp_path), measured)
    assert {key: result[key] for key in KEYS} == {
        "publish_over_memcpy": pytest.approx(3.0),
        "copy_over_memcpy": pytest.approx(1.2),
        "verify_over_memcpy": pytest.approx(0.6),
        "sync_over_stock_tensor": pytest.approx(1.5 / 30),
        "sync_over_stock_distributed": pytest.approx(1.5 / 4.5),
        "rollout_stall_s": 0.75,
    }
    assert result["first_token_s"] == pytest.approx(1.75)
    assert result["sync_over_gathered_distributed"] == pytest.approx(0.25)
    json.dumps(result)


def test_table_shows_every_target_and_the_calls(tmp_path: Path, measured: Measured) -> None:
    text = table(summary(cases.moe(tmp_path), measured))
    assert text.count("<=") == len(TARGETS)
    assert "[100, 50]" in text and "[70]" in text
    assert "2 HTTP requests; 4 files" in text


def test_calls_are_counted_in_threads_too_and_not_outside() -> None:
    def work() -> None:
        for _ in range(10):
            len("")

    with counted() as calls:
        work()
        once = calls.num_calls
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    after = calls.num_calls
    work()
    assert once >= 11 and after >= 2 * once and calls.num_calls == after


def test_mixture_of_experts_is_about_as_large_as_smollm2(tmp_path: Path) -> None:
    case = cases.moe(tmp_path)
    assert read_shape(case.model).moe is not None and case.is_random
    assert 450e6 < cases.num_bytes(case) < 650e6


def test_copy_of_memory_takes_time() -> None:
    assert 0 < MemoryCopy(1 << 20).seconds() < 10
