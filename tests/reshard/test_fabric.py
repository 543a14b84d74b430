"""Floors of seconds follow from bytes and data sheets, and name the resource that is slowest."""

from __future__ import annotations

import pytest

from megarl.errors import LayoutError
from megarl.reshard.fabric import FABRICS, Fabric, fabric_of, predict
from megarl.reshard.placement import Device, Placement
from megarl.reshard.routes import Traffic

SLOW = Fabric("slow", 10.0, 100.0, 1000.0, 2, "in bytes per second")
TOGETHER = Placement(
    {0: Device(0, 0), 1: Device(0, 1)}, {0: Device(0, 0), 1: Device(0, 1), 2: Device(1, 0)}
)


def seconds(traffic: Traffic) -> dict[str, float]:
    found = predict(traffic, TOGETHER, SLOW)
    return {load.resource: load.seconds for load in found.loads}


def test_each_link_loads_its_own_resource() -> None:
    assert seconds(Traffic(network_out={0: 50})) == {
        "nic_out": 5.0,
        "nic_in": 0.0,
        "nvlink_out": 0.0,
        "nvlink_in": 0.0,
        "memory": 0.05,
    }
    assert seconds(Traffic(network_in={2: 30}))["nic_in"] == 3.0
    assert seconds(Traffic(node_out={1: 200}))["nvlink_out"] == 2.0
    assert seconds(Traffic(fanout_in={2: 300}))["nvlink_in"] == 3.0


def test_local_copy_reads_and_writes_the_memory() -> None:
    assert seconds(Traffic(local={0: 500}))["memory"] == 1.0


def test_both_sides_of_one_gpu_add_up() -> None:
    found = predict(Traffic(node_out={1: 100}, fanout_out={1: 100, 2: 150}), TOGETHER, SLOW)
    assert (found.slowest.resource, found.slowest.busiest) == ("nvlink_out", Device(0, 1))
    assert found.floor_s == 2.0


def test_floor_is_the_slowest_resource_and_serial_adds_them_up() -> None:
    found = predict(
        Traffic(network_out={0: 20}, network_in={2: 20}, fanout_out={2: 60}), TOGETHER, SLOW
    )
    assert (found.slowest.resource, found.floor_s) == ("nic_out", 2.0)
    assert found.serial_s == pytest.approx(2.0 + 0.6 + 0.08)


def test_nothing_moved_takes_no_time() -> None:
    assert predict(Traffic(), TOGETHER, SLOW).floor_s == 0.0


def test_unknown_fabric_names_the_known_ones() -> None:
    with pytest.raises(LayoutError, match="h100, h200, b200"):
        fabric_of("h800")


@pytest.mark.parametrize(
    ("name", "nic_gbit", "nvlink_gbytes", "memory_tbytes", "together"),
    [
        ("a100", 200, 600, 2.039, 8),
        ("h100", 400, 900, 3.35, 8),
        ("h200", 400, 900, 4.8, 8),
        ("b200", 400, 1800, 8, 8),
        ("b300", 800, 1800, 8, 8),
        ("gb200", 400, 1800, 8, 72),
    ],
)
def test_rates_are_those_of_the_data_sheet_in_one_direction(
    name: str, nic_gbit: float, nvlink_gbytes: float, memory_tbytes: float, together: int
) -> None:
    # One NIC for a GPU, in bits; NVLink is sold as the sum of both directions.
    fabric = FABRICS[name]
    assert fabric.nic_bytes_per_s == nic_gbit * 1e9 / 8
    assert fabric.nvlink_bytes_per_s == nvlink_gbytes * 1e9 / 2
    assert fabric.memory_bytes_per_s == pytest.approx(memory_tbytes * 1e12)
    assert fabric.gpus_per_node == together
