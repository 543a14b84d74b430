"""Checkpoints are whole or do not exist, and the newest whole one is continued from."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given

from megarl.config.schema import Config
from megarl.controller import resume
from megarl.controller.resume import Checkpoints, newest, whole_checkpoints
from megarl.errors import CheckpointError, LearnerError
from megarl.learner.client import LearnerClient
from tests.hostile import SEEDED, hurt


class SavingLearner:
    """Writes one file where the learner would write its shards; fails where told to."""

    def __init__(self) -> None:
        self.fails = False

    async def save(self, path: str, version: int) -> None:
        Path(path).mkdir(parents=True)
        (Path(path) / "shard").write_text(str(version))
        if self.fails:
            raise LearnerError("save: disk full")


def checkpoints(run_dir: Path, keep: int = 2, every: int = 2) -> tuple[Checkpoints, SavingLearner]:
    learner = SavingLearner()
    config = Config.model_validate(
        {
            "actor": {"model": "m"},
            "checkpoint": {"keep": keep, "every": every},
            "loop": {"versions": 7},
        }
    )
    return Checkpoints(config, run_dir, cast(LearnerClient, learner)), learner


def test_newest_whole_checkpoint_is_found_with_its_state(tmp_path: Path) -> None:
    saver, _ = checkpoints(tmp_path)
    for version in (2, 4):
        asyncio.run(saver.save(version, {"position": version * 10}))
    saved = newest(tmp_path)
    assert saved is not None
    assert (saved.version, saved.prompts) == (4, {"position": 40})
    assert (saved.weights / "shard").read_text() == "4"


def test_run_without_a_checkpoint_starts_anew(tmp_path: Path) -> None:
    assert newest(tmp_path) is None


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    saver, _ = checkpoints(tmp_path, keep=2)
    for version in (2, 4, 6):
        asyncio.run(saver.save(version, {}))
    assert [p.name for p in whole_checkpoints(tmp_path / "checkpoints")] == ["v000004", "v000006"]


def test_save_that_fails_leaves_the_older_one_to_continue_from(tmp_path: Path) -> None:
    saver, learner = checkpoints(tmp_path)
    asyncio.run(saver.save(2, {}))
    learner.fails = True
    with pytest.raises(LearnerError):
        asyncio.run(saver.save(4, {}))
    saved = newest(tmp_path)
    assert saved is not None and saved.version == 2
    learner.fails = False
    asyncio.run(saver.save(4, {}))
    saved = newest(tmp_path)
    assert saved is not None and saved.version == 4


def test_state_that_cannot_be_read_names_the_file_and_what_to_do(tmp_path: Path) -> None:
    saver, _ = checkpoints(tmp_path)
    asyncio.run(saver.save(2, {}))
    (tmp_path / "checkpoints/v000002/state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"v000002/state.json.*remove that folder"):
        newest(tmp_path)


def test_last_version_is_saved_whatever_the_interval(tmp_path: Path) -> None:
    saver, _ = checkpoints(tmp_path, every=0)
    assert [version for version in range(1, 8) if saver.is_due(version)] == [7]
    saver, _ = checkpoints(tmp_path, every=3)
    assert [version for version in range(1, 8) if saver.is_due(version)] == [3, 6, 7]


def test_checkpoint_whose_removal_was_cut_short_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, _ = checkpoints(tmp_path, keep=1)
    asyncio.run(saver.save(2, {}))

    def killed(folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(resume.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        resume._remove(tmp_path / "checkpoints/v000002")
    assert newest(tmp_path) is None


def test_copy_of_a_checkpoint_is_neither_continued_from_nor_removed(tmp_path: Path) -> None:
    saver, _ = checkpoints(tmp_path, keep=1)
    asyncio.run(saver.save(2, {}))
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "v000002", folder / "v000002-best")
    shutil.copytree(folder / "v000002", folder / "vbest")
    asyncio.run(saver.save(4, {}))
    assert [path.name for path in whole_checkpoints(folder)] == ["v000004"]
    assert (folder / "v000002-best" / "COMPLETE").exists()
    saved = newest(tmp_path)
    assert saved is not None and saved.version == 4


def test_version_of_seven_digits_is_newer_than_one_of_six(tmp_path: Path) -> None:
    for version in (999_999, 1_000_000):
        folder = tmp_path / f"v{version:06d}"
        folder.mkdir()
        (folder / "COMPLETE").touch()
    assert whole_checkpoints(tmp_path)[-1].name == "v1000000"


STATE = {"version": 4, "prompts": {"pass": 0, "position": 3}}


@SEEDED
@given(hurt(STATE))
def test_any_state_of_a_checkpoint_is_its_folders_or_is_named(tmp_path: Path, state: Any) -> None:
    folder = tmp_path / "checkpoints" / "v000004"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "COMPLETE").touch()
    (folder / "state.json").write_text(json.dumps(state))
    try:
        saved = newest(tmp_path)
    except CheckpointError as error:
        assert "v000004/state.json: cannot be read" in str(error)
        return
    assert saved is not None and saved.version == 4 and isinstance(saved.prompts, dict)
