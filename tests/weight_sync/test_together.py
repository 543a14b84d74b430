"""Learner ranks that speak together: one that has ended is told of in words, known as lost."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megarl.errors import WeightSyncError
from megarl.learner.control import is_lost_peer
from megarl.weight_sync import together


def test_rank_that_has_ended_is_an_error_in_words_that_blames_no_rank_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost(*_: object, **__: object) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer\nmore")

    monkeypatch.setattr(dist, "broadcast_object_list", lost)
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)
    with pytest.raises(
        WeightSyncError, match="a learner rank has ended or does not answer"
    ) as told:
        together.from_first(object(), 1)  # type: ignore[arg-type]
    assert "closed by peer" in str(told.value) and "more" not in str(told.value)
    assert is_lost_peer(told.value)
    assert not is_lost_peer(WeightSyncError("of its own"))
