"""`megarl train` with learner and server taking turns: the order of a cycle, memory, and deaths.

On a CPU SGLang is told to release memory and frees nothing: what is looked at is order and books.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.whole.conftest import Rows, Run
from tests.whole.test_faults import learner_rank, scheduler

SHARED = ("--placement.mode", "colocated", "--placement.memory_tolerance_mib", "128")
# (stage, what the learner and the servers gave for it, what they took)
ALL, KV, NONE = "gradients optimizer weights", "cuda_graph kv_cache", ""
CYCLE = [
    ("learning", NONE, f"{KV} weights", ALL, NONE),
    ("syncing", "gradients optimizer", NONE, NONE, "weights"),
    ("generating", "weights", NONE, NONE, KV),
]
SAVE = [
    ("saving", NONE, KV, "optimizer weights", NONE),
    ("generating", "optimizer weights", NONE, NONE, KV),
]
SYNC = [("syncing", NONE, KV, "weights", NONE), CYCLE[-1]]
FIRST = [("generating", ALL, NONE, NONE, KV)]


def turns(events: Rows) -> list[tuple[str, str, str, str, str]]:
    """The changes of stage, as they were written."""
    names = ("stage", "learner_gave", "servers_gave", "learner_took", "servers_took")
    return [tuple(event[n] for n in names) for event in events if event["event"] == "turn"]


def assert_trained(run: Run, steps: int) -> None:
    """Every step is there once, agrees with the server, and was proved on it."""
    assert [row["step"] for row in run.rows] == list(range(steps))
    for row in run.rows:
        assert row["buffer/samples"] == 256
        assert row["mismatch/mean_abs_logprob"] < 1e-4
        assert row["memory/floor_learner_state_bytes"] == 0
        assert row["memory/generating_learner_state_bytes"] == 0
        weights, everything = (
            row[f"memory/{stage}_learner_state_bytes"] for stage in ("syncing", "learning")
        )
        assert 0 < 2.9 * weights < everything  # gradients, and two moments over dp ranks


def in_stage(run: Run, stage: str, steps: int) -> Callable[[], bool]:
    """Whether so many steps are done and the last change was to `stage`."""

    def happened() -> bool:
        last = [event for event in run.events if event["event"] == "turn"][-1:]
        return len(run.rows) >= steps and bool(last) and last[0]["stage"] == stage

    return happened


def test_colocated_run_takes_turns_in_order_with_flat_memory(
    quickstart: Callable[..., Run],
) -> None:
    layout = ["--learner.parallel.tp", "1", "--placement.learner_gpus", "2"]
    run = quickstart("--loop.versions", "3", "--checkpoint.every", "2", *SHARED, *layout)
    run.finish()
    assert_trained(run, 3)
    # parity at start, the first sync, parity after it; the last step and the second are saved
    start = [*FIRST, *SYNC, *SYNC, *SYNC]
    assert turns(run.events) == [*start, *CYCLE, *CYCLE, *SAVE, *CYCLE, *SAVE]
    for row in run.rows:
        assert row["weight_sync/verified_servers"] == 1
        assert row["weight_sync/bytes"] == row["weight_sync/minimum_bytes"] > 0
        assert row["grad_norm"] > 0
    assert not run.processes()


@pytest.mark.slow
def test_server_killed_while_its_memory_is_released_comes_back_when_it_is_its_turn(
    quickstart: Callable[..., Run],
) -> None:
    run = quickstart("--loop.versions", "6", *SHARED, "--learner.epochs_per_rollout", "4")
    run.start()
    run.until(in_stage(run, "learning", 2))
    scheduler(run).send_signal(signal.SIGKILL)
    assert run.wait(300) == 0, run.output
    assert_trained(run, 6)
    kinds = [event["event"] for event in run.events]
    rejoined = kinds.index("server_rejoined")
    before = [event["stage"] for event in run.events[:rejoined] if event["event"] == "turn"]
    # nobody was there to be synced; it started in the stage after that, and was synced between
    assert before[-4:] == ["syncing", "generating", "syncing", "generating"]


@pytest.mark.slow
def test_server_killed_while_it_generates_is_synced_between(quickstart: Callable[..., Run]) -> None:
    run = quickstart("--loop.versions", "6", *SHARED)
    run.start()
    run.until(in_stage(run, "generating", 2))
    scheduler(run).send_signal(signal.SIGKILL)
    assert run.wait(300) == 0, run.output
    assert_trained(run, 6)
    assert "server_rejoined" in [event["event"] for event in run.events]


@pytest.mark.slow
def test_server_killed_beside_one_that_generates_is_synced_with_the_next_version(
    quickstart: Callable[..., Run],
) -> None:
    run = quickstart("--loop.versions", "5", *SHARED, "--rollout.servers", "2")
    run.start()
    run.until(in_stage(run, "generating", 2))
    scheduler(run).send_signal(signal.SIGKILL)
    assert run.wait(400) == 0, run.output
    assert_trained(run, 5)
    assert len(list((run.dir / "logs").glob("server-*.1.log"))) == 1
    assert "server_rejoined" not in [event["event"] for event in run.events]
    assert run.rows[-1]["weight_sync/verified_servers"] == 2


@pytest.mark.slow
def test_learner_killed_while_it_is_offloaded_ends_the_run_which_then_resumes(
    quickstart: Callable[..., Run],
) -> None:
    run = quickstart("--loop.versions", "6", "--checkpoint.every", "2", *SHARED)
    run.start()
    generates = in_stage(run, "generating", 3)
    run.until(lambda: run.is_saved(2) and generates())
    learner_rank(run, 1).send_signal(signal.SIGKILL)
    assert run.wait(60) == 1
    assert "rank 1" in run.output[-2000:] and "SIGKILL" in run.output[-2000:]
    assert not run.processes()
    run.finish()
    assert_trained(run, 6)
    assert any(event["event"] == "resume" and event["version"] >= 2 for event in run.events)
