"""Which versions are exported and where, what takes whose place, and what a failure does."""

import asyncio
import io
from pathlib import Path
from typing import Any, cast

import pytest

from megarl.config.schema import Config
from megarl.controller.exports import Exports
from megarl.errors import CheckpointError
from megarl.learner.client import LearnerClient
from megarl.observe.metrics import MetricsLog
from megarl.observe.progress import Progress


class ExportingLearner:
    """Writes one file into a new folder; fails where told to."""

    def __init__(self) -> None:
        self.error = ""

    async def export(self, folder: Path) -> int:
        assert not folder.exists()
        if self.error:
            raise CheckpointError(self.error)
        folder.mkdir()
        (folder / "model.safetensors").write_text("weights")
        return 7


def exporting(run_dir: Path, **settings: object) -> tuple[Exports, ExportingLearner, io.StringIO]:
    learner, told = ExportingLearner(), io.StringIO()
    groups: dict[str, Any] = {"actor": {"model": "m"}, "loop": {"versions": 7}}
    config = Config.model_validate({**groups, "export": settings, "run": {"name": "mine"}})
    client = cast(LearnerClient, learner)
    return (
        Exports(config, run_dir, client, MetricsLog(run_dir), Progress(7, told)),
        learner,
        told,
    )


def test_versions_that_are_due_are_those_of_the_settings(tmp_path: Path) -> None:
    due = {
        (): {"every": 0},
        (7,): {"last": True},
        (3, 6): {"every": 3},
        (2, 4, 6, 7): {"every": 2, "last": True},
    }
    for versions, settings in due.items():
        exports, _, _ = exporting(tmp_path, **settings)
        assert tuple(version for version in range(1, 8) if exports.is_due(version)) == versions


def test_version_that_is_made_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    exports, _, told = exporting(tmp_path, every=1)
    old = tmp_path / "export/v000002"
    old.mkdir(parents=True)
    (old / "model-00001-of-00002.safetensors").touch()
    asyncio.run(exports.export(2))
    assert [path.name for path in old.iterdir()] == ["model.safetensors"]
    assert told.getvalue() == ""


def test_export_whose_removal_is_cut_short_has_no_name_of_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exports, _, _ = exporting(tmp_path, every=1)
    old = tmp_path / "export/v000002"
    old.mkdir(parents=True)
    (old / "model.safetensors").touch()

    def killed(folder: Path, ignore_errors: bool = False) -> None:
        if folder.exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shutil.rmtree", killed)
        asyncio.run(exports.export(2))
    assert not old.exists() and list(old.parent.iterdir())
    asyncio.run(exports.sweep())
    assert not list(old.parent.iterdir())


def test_folder_of_exports_has_one_for_each_run(tmp_path: Path) -> None:
    exports, _, _ = exporting(tmp_path, last=True, dir=str(tmp_path / "shared"))
    asyncio.run(exports.export(7))
    assert (tmp_path / "shared/mine/v000007/model.safetensors").exists()


def test_export_that_fails_is_told_and_is_an_error_where_it_is_the_last(tmp_path: Path) -> None:
    exports, learner, told = exporting(tmp_path, every=1)
    learner.error = "v000003: no space left"
    asyncio.run(exports.export(3))
    assert "version 3 was not exported: v000003: no space left. The run goes on" in told.getvalue()
    learner.error = ""
    asyncio.run(exports.export(7))
    exports.check(7)
    learner.error = "no space left"
    asyncio.run(exports.export(7))
    with pytest.raises(CheckpointError, match=r"version 7 is saved.*megarl convert .*/v000007"):
        exports.check(7)


def test_what_a_killed_export_has_left_is_swept(tmp_path: Path) -> None:
    exports, _, _ = exporting(tmp_path, every=1)
    for name in ("v000001", "v000002.partial", "mine.partial"):
        (tmp_path / "export" / name).mkdir(parents=True)
    asyncio.run(exports.sweep())
    assert sorted(path.name for path in (tmp_path / "export").iterdir()) == [
        "mine.partial",
        "v000001",
    ]
