"""Forks of the process that has imported Megatron."""

from __future__ import annotations

import json

import pytest

from tests.megatron_engine import Engine


def test_each_program_has_a_process_of_its_own_as_the_import_left_it(
    megatron_engine: Engine,
) -> None:
    first, second = (json.loads(megatron_engine.run("tests.told_ranks", ranks=2)) for _ in range(2))
    assert first[0] != second[0]
    assert first[1:] == second[1:] == [True, "0", "2", "127.0.0.1"]


def test_rank_that_fails_is_told_of_and_ends_the_one_that_waits_for_it(
    megatron_engine: Engine,
) -> None:
    with pytest.raises(AssertionError) as error:
        megatron_engine.run("tests.told_ranks", "fail", ranks=2, limit_s=300.0)
    told = str(error.value)
    assert "rank 1 of tests.told_ranks ended with 1: Traceback" in told
    assert "ValueError: as it was meant to" in told and "rank 0" not in told
