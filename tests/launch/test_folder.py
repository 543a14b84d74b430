import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.launch.folder import open_run_folder


def config(**groups: object) -> Config:
    return Config.model_validate({"actor": {"model": "/m"}, **groups})


def begin(run_dir: Path, setting: Config) -> str:
    """A run that made one step."""
    with open_run_folder(setting, run_dir) as folder:
        (run_dir / "metrics.jsonl").write_text('{"step": 0}\n')
        return folder.run_id


def test_second_run_in_a_folder_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    with open_run_folder(config(), tmp_path / "run"):
        code = """
import sys
from pathlib import Path
from megarl.config.schema import Config
from megarl.launch.folder import open_run_folder
with open_run_folder(Config.model_validate({"actor": {"model": "/m"}}), Path(sys.argv[1])):
    pass
"""
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True
        )
    assert "ConfigError: another run is using" in done.stderr
    assert "(process " in done.stderr
    with open_run_folder(config(), tmp_path / "run"):
        pass


def test_each_start_has_its_own_id_and_knows_the_earlier_one(tmp_path: Path) -> None:
    with open_run_folder(config(), tmp_path) as first:
        assert first.run_ids == (first.run_id,)
    with open_run_folder(config(), tmp_path) as second:
        assert second.run_ids == (second.run_id, first.run_id)
    assert second.run_id != first.run_id


def test_continuing_with_other_settings_is_refused_and_names_them(tmp_path: Path) -> None:
    begin(tmp_path, config())
    rollout = {"samples_per_prompt": 2}
    other = config(run={"seed": 1}, learner={"optimizer": {"lr": 0.5}}, rollout=rollout)
    with pytest.raises(ConfigError) as refused, open_run_folder(other, tmp_path):
        pass
    assert refused.value.exit_status == 2
    changes = (
        "learner.optimizer.lr was 1e-06, is 0.5; rollout.samples_per_prompt was 16, is 2; "
        "run.seed was 0, "
    )
    assert f"other settings: {changes}is 1. Continue" in str(refused.value)


def test_continuing_longer_and_elsewhere_is_allowed(tmp_path: Path) -> None:
    begin(tmp_path, config())
    more = config(
        loop={"versions": 500},
        launch={"kind": "local"},
        deadline={"sync_s": 5.0},
        checkpoint={"keep": 9, "every": 3, "best": "eval/accuracy"},
        export={"last": True},
        learner={"parallel": {"tp": 2, "pp": 2}, "recompute": {"granularity": "full"}},
        placement={"mode": "colocated"},
        rollout={"servers": 2, "parallel": {"tp": 2}},
        weight_sync={"mode": "hf"},
        observe={"wandb": "off"},
    )
    begin(tmp_path, more)
    assert "versions = 500" in (tmp_path / "config.toml").read_text()


def test_settings_may_change_before_the_first_step(tmp_path: Path) -> None:
    with open_run_folder(config(), tmp_path):
        pass
    with open_run_folder(config(run={"seed": 1}), tmp_path):
        pass


def test_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"choose another run\.dir"),
        open_run_folder(config(), tmp_path / "file" / "run"),
    ):
        pass


def test_run_of_another_version_of_megarl_is_refused_with_what_is_not_known(tmp_path: Path) -> None:
    begin(tmp_path, config())
    text = (tmp_path / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(text.replace("[run]", "[run]\nsed = 3", 1))
    with (
        pytest.raises(ConfigError, match=r"this version of megarl does not read.*run\.sed"),
        open_run_folder(config(), tmp_path),
    ):
        pass


@pytest.mark.parametrize("text", ["", "null", "[1]", '{"pid": 1}', "[" * 100_000, "\udcff"])
def test_broken_lock_file_of_an_earlier_start_is_taken_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.lock").write_text(text, errors="surrogateescape")
    with open_run_folder(config(), tmp_path) as folder:
        assert folder.earlier_run_id == ""


def test_folder_whose_name_has_spaces_and_letters_of_all_kinds_is_used(tmp_path: Path) -> None:
    with open_run_folder(config(), tmp_path / "läufe 実験" / "a b'c\"") as folder:
        assert (folder.path / "config.toml").is_file()
