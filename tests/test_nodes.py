"""What a machine offers: the settings' checks and the launcher count its GPUs by one rule."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megarl.config.check_model import uses_cpu
from megarl.config.schema import Config
from megarl.launch.topology import launch_device, local_nodes
from megarl.nodes import visible_gpus


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == 1
    assert visible_gpus({}, tmp_path / "none") == 0


@pytest.mark.parametrize("visible", ["", "0", "NoDevFiles", "0,1"])
@pytest.mark.parametrize("wanted", ["auto", "cpu", "cuda"])
def test_settings_are_checked_for_the_device_that_is_launched(
    monkeypatch: pytest.MonkeyPatch, visible: str, wanted: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = Config.model_validate({"actor": {"model": "m"}, "launch": {"device": wanted}})
    assert uses_cpu(config) == (launch_device(config, local_nodes(os.environ)) == "cpu")
