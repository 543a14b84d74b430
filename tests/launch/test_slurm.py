"""When a Slurm job ends, as far as can be told without one; a real one is in tests/slurm."""

import pytest

from megarl.launch.slurm import end_time_s, time_limit_s


def test_end_of_a_job_is_what_slurm_says_in_the_environment() -> None:
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1764560000"}
    assert end_time_s(environment) == 1764560000.0


def test_there_is_no_end_outside_a_job() -> None:
    assert end_time_s({"SLURM_JOB_END_TIME": "1764560000"}) is None


def test_limit_of_a_job_is_from_its_start_to_its_end_where_both_are_known() -> None:
    times = {"SLURM_JOB_START_TIME": "1764560000", "SLURM_JOB_END_TIME": "1764560600"}
    assert time_limit_s({"SLURM_JOB_ID": "7", **times}) == 600.0
    assert time_limit_s(times) is None
    assert time_limit_s({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1764560600"}) is None


def test_end_that_slurm_does_not_tell_is_none_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert end_time_s({"SLURM_JOB_ID": "7"}) is None
    assert "the job's end is unknown" in caplog.text
