"""One device for all Gloo groups of a process, on real ranks."""

from __future__ import annotations

import json

import pytest

from megarl.compat import gloo_device
from tests.megatron_engine import Engine


def test_all_groups_of_a_mesh_have_one_thread_that_polls_and_sum_what_they_should(
    megatron_engine: Engine,
) -> None:
    polling, working, sums = json.loads(megatron_engine.run("tests.compat.gloo_ranks", ranks=2))
    assert polling == 1 and working > 20  # of ten groups or more
    assert sums == [3.0, 3.0, 3.0, 1.0]


def test_interface_that_the_environment_names_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,absent0")
    with pytest.raises(RuntimeError, match="absent0"):
        gloo_device._devices(-1)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert len(gloo_device._devices(-1)) == 1
    assert gloo_device._devices(-1) is gloo_device._devices(-1)
