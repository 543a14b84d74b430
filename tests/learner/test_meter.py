"""The meter of memory on one rank: each phase has its own peak, beside what was planned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarl.learner.meter import MemoryMeter, measured
from megarl.planning.memory import HostBytes, RankMemory
from megarl.planning.state import StateBytes

MIB = 1 << 20
PLANNED = RankMemory(
    policy=StateBytes(weights=2, gradients=4, optimizer=8),
    critic=StateBytes(),
    works=(),
    host=HostBytes(),
    peaks={"score": 10, "train": 20, "sync": 30, "offloaded": 40},
)


@pytest.fixture
def meter(tmp_path: Path) -> Iterator[MemoryMeter]:
    """Of a rank that is alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield MemoryMeter(torch.device("cpu"), lambda: 14, PLANNED)
    dist.destroy_process_group()


def test_each_phase_has_its_own_peak_beside_its_plan(meter: MemoryMeter) -> None:
    with meter.phase("score"):
        torch.ones(64 * MIB, dtype=torch.uint8)  # gone again when the phase ends
    with meter.phase("train"):
        pass
    found = meter.take()
    assert found["memory/score_rss_bytes"] > found["memory/train_rss_bytes"] + 32 * MIB
    assert (found["memory/score_predicted_bytes"], found["memory/train_predicted_bytes"]) == (
        10,
        20,
    )
    assert found["memory/state_bytes"] == found["memory/state_predicted_bytes"] == 14
    assert "memory/sync_rss_bytes" not in found and meter.take() == {}


def test_largest_of_a_phase_that_is_gone_through_several_times_counts(meter: MemoryMeter) -> None:
    for mib in (1, 64, 1):
        with meter.phase("train"):
            torch.ones(mib * MIB, dtype=torch.uint8)
    most = meter.take()["memory/train_rss_bytes"]
    with meter.phase("train"):
        torch.ones(MIB, dtype=torch.uint8)
    assert most > meter.take()["memory/train_rss_bytes"] + 32 * MIB


def test_phase_that_fails_is_measured(meter: MemoryMeter) -> None:
    with pytest.raises(ValueError, match="no"), meter.phase("sync"):
        raise ValueError("no")
    assert meter.take()["memory/sync_predicted_bytes"] == 30


def test_what_is_left_is_that_of_the_last_look(meter: MemoryMeter) -> None:
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    meter.note("offloaded")
    before = meter.take()["memory/offloaded_rss_bytes"]
    meter.note("offloaded")
    del block
    meter.note("offloaded")
    assert meter.take()["memory/offloaded_rss_bytes"] < before - 32 * MIB


def test_method_is_a_phase_of_its_objects_meter(meter: MemoryMeter) -> None:
    class Rank:
        def __init__(self) -> None:
            self.meter = meter

        @measured("score")
        def score(self, number: int) -> int:
            """Twice."""
            return 2 * number

    assert Rank().score(number=3) == 6
    assert "Twice" in str(Rank.score.__doc__)
    assert "memory/score_rss_bytes" in meter.take()
