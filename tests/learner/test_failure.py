"""Examples in the service's pure modules, and the account of a failed rank."""

import doctest
import shutil

import pytest

from megarl.learner import failure, phases, verbs, wire
from megarl.learner.failure import Exit, Memory, describe
from megarl.learner.phases import PhaseFile, read_phases


@pytest.mark.parametrize("module", [failure, phases, verbs, wire])
def test_examples_in_the_text_hold(module) -> None:
    assert doctest.testmod(module).failed == 0


def test_phase_file_follows_the_rank_and_keeps_its_first_error(tmp_path) -> None:
    mine = PhaseFile(tmp_path, 3)
    mine.begin("step", 4)
    mine.mark("optimizer")
    mine.fail("ValueError: x", lost_peer=False)
    mine.fail("later", lost_peer=True)
    seen = read_phases(tmp_path)[3]
    assert (seen.verb, seen.phase, seen.sequence) == ("step", "optimizer", 4)
    assert seen.error == "ValueError: x" and not seen.lost_peer and seen.rss_bytes > 1 << 20
    mine.forgive()
    mine.idle()
    assert read_phases(tmp_path)[3].place == "idle after step"
    assert read_phases(tmp_path)[3].error == ""


def test_half_written_and_foreign_phase_files_are_left_out(tmp_path) -> None:
    PhaseFile(tmp_path, 0)
    (tmp_path / "learner-rank1.phase").write_text('{"rank": 1')
    (tmp_path / "learner-rank2.phase.77.tmp").write_text("{}")
    assert list(read_phases(tmp_path)) == [0]


def test_phase_that_cannot_be_written_does_not_end_the_rank(tmp_path) -> None:
    phases = PhaseFile(tmp_path / "logs", rank=0)
    shutil.rmtree(tmp_path / "logs")
    phases.begin("save", 3)
    phases.fail("no space left", lost_peer=False)
    assert phases.current.place == "save/begin" and phases.current.error == "no space left"


def test_account_of_a_killed_rank_names_rank_host_signal_phase_and_memory(tmp_path) -> None:
    mine = PhaseFile(tmp_path, 1)
    mine.begin("step", 1)
    mine.mark("forward")
    phase = read_phases(tmp_path)[1]
    memory = Memory(3 << 30, 4 << 30, 5 << 30, 1)
    account = describe(1, Exit(phase.pid, -9), phase, "n1", memory, phase.since + 2)
    assert account.text.startswith(f"learner rank 1 (host {phase.host}, pid {phase.pid}) was ended")
    for part in ("SIGKILL", "step/forward for 2.0 s", "3.00 GiB", "lack of memory"):
        assert part in account.text
