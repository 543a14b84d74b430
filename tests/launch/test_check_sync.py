"""`megarl check sync --dry`, which starts nothing."""

from pathlib import Path

from megarl.config.load import load_config
from megarl.launch.check_sync import explain_sync

QUICKSTART = str(Path(__file__).parents[2] / "examples" / "quickstart.toml")


def test_dry_check_says_where_it_took_gpus_for_a_device_that_is_not_set() -> None:
    unset = explain_sync(load_config(QUICKSTART, ["--launch.device", "auto"]))
    assert "exact     unproved" in unset
    assert "launch.device = auto is planned as cuda" in unset
    cpu = explain_sync(load_config(QUICKSTART, []))
    assert "exact     proved" in cpu and "planned as cuda" not in cpu
