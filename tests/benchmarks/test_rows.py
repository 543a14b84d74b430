"""Every row of the benchmark can be laid out."""

from __future__ import annotations

import pytest

from benchmarks.reshard.rows import ROWS, Row


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_both_layouts_of_every_row_can_be_built(row: Row) -> None:
    source, destination, placement = row.layouts()
    placement.check(source, destination)
    assert len(source.rank_ids) == row.learner.size
    assert len(destination.rank_ids) == row.server.servers * row.server.size
