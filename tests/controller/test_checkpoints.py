"""Saving beside the loop: whole checkpoints or none, which of them stay, and saves that fail."""

import asyncio
import io
import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest

from megarl.config.schema import Config
from megarl.controller import checkpoints
from megarl.controller.checkpoints import Checkpoints
from megarl.controller.resume import newest, whole_checkpoints
from megarl.errors import CheckpointError, LearnerError
from megarl.learner.client import LearnerClient
from megarl.observe.metrics import MetricsLog
from megarl.observe.progress import Progress


class SavingLearner:
    """Writes one file where the learner would write its shards; fails where told to."""

    def __init__(self) -> None:
        self.fails: Exception | None = None
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.path: Path | None = None
        self.most_under_way = self.polls = 0

    async def begin_save(self, path: str, version: int) -> None:
        assert self.path is None, "one save at a time"
        self.path = Path(path)
        self.path.mkdir(parents=True)
        (self.path / "shard").write_text(str(version))

    async def end_save(self, wait: bool) -> bool:
        self.polls += 1
        if wait:
            await self.may_end.wait()
        if not self.may_end.is_set():
            return False
        self.path = None
        if self.fails:
            raise self.fails
        return True


def saving(
    run_dir: Path, keep: int = 2, every: int = 2, **settings: object
) -> tuple[Checkpoints, SavingLearner, io.StringIO]:
    learner, told = SavingLearner(), io.StringIO()
    run_dir.mkdir(exist_ok=True)
    config = Config.model_validate(
        {
            "actor": {"model": "m"},
            "checkpoint": {"keep": keep, "every": every, **settings},
            "loop": {"versions": 7},
        }
    )
    progress, metrics = Progress(7, told), MetricsLog(run_dir)
    client = cast(LearnerClient, learner)
    return Checkpoints(config, run_dir, client, metrics, progress), learner, told


async def save_all(saver: Checkpoints, *versions: int, **more: Any) -> None:
    for version in versions:
        await saver.save(version, {"position": version * 10}, **more)
    await saver.settle()


def names(run_dir: Path) -> list[str]:
    return [path.name for path in whole_checkpoints(run_dir / "checkpoints")]


async def test_newest_whole_checkpoint_is_found_with_its_state(tmp_path: Path) -> None:
    saver, _, _ = saving(tmp_path)
    await save_all(saver, 2, 4)
    saved = newest(tmp_path)
    assert saved is not None
    assert (saved.version, saved.prompts) == (4, {"position": 40})
    assert (saved.weights / "shard").read_text() == "4"


async def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    saver, _, _ = saving(tmp_path, keep=2)
    await save_all(saver, 2, 4, 6)
    assert names(tmp_path) == ["v000004", "v000006"]


async def test_every_third_version_and_the_best_stay_beside_the_newest(tmp_path: Path) -> None:
    saver, _, _ = saving(tmp_path, keep=1, every=1, keep_every=3, best="eval/accuracy")
    for version, accuracy in enumerate((0.1, 0.9, 0.2, 0.3, None, 0.4), start=1):
        values = {} if accuracy is None else {"eval/accuracy": accuracy, "lr": 1.0}
        await save_all(saver, version, values=values)
    assert names(tmp_path) == ["v000002", "v000003", "v000006"]
    saved = newest(tmp_path)
    assert saved is not None and saved.metrics == {"eval/accuracy": 0.4}


async def test_best_is_a_number_and_the_newest_of_equals(tmp_path: Path) -> None:
    saver, _, _ = saving(tmp_path, keep=1, every=1, best="kl", best_is="lowest")
    for version, kl in enumerate((0.3, float("nan"), 0.1, 0.1, -float("inf"), 0.5), start=1):
        await save_all(saver, version, values={"kl": kl})
    assert names(tmp_path) == ["v000004", "v000006"]


async def test_metric_that_no_version_has_is_told_of_once_with_the_nearest(tmp_path: Path) -> None:
    saver, _, told = saving(tmp_path, every=1, best="reward/maen")
    for version in (1, 2):
        await save_all(saver, version, values={"reward/mean": 0.5, "lr": 1.0})
    assert told.getvalue().count("checkpoint.best = reward/maen: version 1 has no such metric") == 1
    assert told.getvalue().count("the nearest is reward/mean") == 1


async def test_version_that_is_not_evaluated_is_no_reason_to_tell_of_the_best(
    tmp_path: Path,
) -> None:
    saver, _, told = saving(tmp_path, every=1, best="eval/accuracy")
    await save_all(saver, 1, values={"reward/mean": 0.5})
    assert "checkpoint.best" not in told.getvalue()


async def test_version_that_is_saved_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    saver, _, _ = saving(tmp_path)
    await save_all(saver, 2)
    (tmp_path / "checkpoints/v000002/megatron/of the first").touch()
    await save_all(saver, 2)
    assert names(tmp_path) == ["v000002"]
    files = (tmp_path / "checkpoints/v000002/megatron").iterdir()
    assert [path.name for path in files] == ["shard"]


async def test_checkpoint_that_cannot_be_removed_is_no_reason_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saver, _, told = saving(tmp_path, keep=1)
    await save_all(saver, 2)

    def busy(folder: Path, ignore_errors: bool = False) -> None:
        if ignore_errors:
            return
        raise OSError(16, "Device or resource busy", str(folder))

    monkeypatch.setattr(checkpoints.shutil, "rmtree", busy)
    await save_all(saver, 4)
    assert names(tmp_path) == ["v000004"] and told.getvalue() == ""
    assert "checkpoint not removed version=2" in caplog.text


async def test_checkpoint_folder_that_is_removed_under_a_save_is_told_and_the_next_is_saved(
    tmp_path: Path,
) -> None:
    saver, learner, told = saving(tmp_path)
    learner.may_end.clear()
    await saver.save(2, {})
    shutil.rmtree(tmp_path / "checkpoints")
    learner.may_end.set()
    await saver.settle()
    assert "version 2 was not saved: " in told.getvalue() and saver.is_due(3)
    await save_all(saver, 3)
    assert names(tmp_path) == ["v000003"]


async def test_training_goes_on_while_a_save_is_under_way_and_a_second_one_waits(
    tmp_path: Path,
) -> None:
    saver, learner, _ = saving(tmp_path)
    learner.may_end.clear()
    await saver.save(2, {})
    assert names(tmp_path) == [] and saver.is_saved(2)
    second = asyncio.create_task(saver.save(4, {}))
    while learner.polls < 3:
        await asyncio.sleep(0)
    assert not second.done()
    learner.may_end.set()
    await second
    await saver.settle()
    assert names(tmp_path) == ["v000002", "v000004"]


async def test_last_version_and_one_in_the_foreground_are_waited_for(tmp_path: Path) -> None:
    saver, learner, _ = saving(tmp_path)
    await saver.save(7, {})
    assert names(tmp_path) == ["v000007"]
    saver, learner, _ = saving(tmp_path, background=False)
    await saver.save(4, {})
    assert "v000004" in names(tmp_path)
    assert learner.polls == 1


async def test_save_that_fails_is_told_and_the_next_version_is_saved(tmp_path: Path) -> None:
    saver, learner, told = saving(tmp_path)
    await save_all(saver, 2)
    learner.fails = CheckpointError("v000004: no space left")
    await save_all(saver, 4)
    assert "version 4 was not saved: v000004: no space left. Training goes on" in told.getvalue()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["checkpoint", "checkpoint_failed"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["v000002"]
    assert saver.is_due(5) and not saver.is_saved(4)
    learner.fails = None
    await save_all(saver, 5)
    assert names(tmp_path) == ["v000002", "v000005"]
    assert not saver.is_due(3)


async def test_failing_save_of_the_last_version_is_raised(tmp_path: Path) -> None:
    saver, learner, _ = saving(tmp_path)
    learner.fails = CheckpointError("no space left")
    with pytest.raises(CheckpointError, match="no space left"):
        await saver.save(7, {})


async def test_place_where_no_folder_can_be_made_is_told_and_training_goes_on(
    tmp_path: Path,
) -> None:
    (tmp_path / "checkpoints").write_text("a file, in which not even root can make a folder")
    saver, _, told = saving(tmp_path)
    await save_all(saver, 2)
    assert f"Not a directory: '{tmp_path}/checkpoints/v000002.partial" in told.getvalue()
    with pytest.raises(OSError, match="Not a directory"):
        await saver.save(7, {})


async def test_learner_that_is_gone_ends_the_run(tmp_path: Path) -> None:
    saver, learner, _ = saving(tmp_path)
    learner.fails = LearnerError("rank 1 was killed")
    with pytest.raises(LearnerError, match="rank 1"):
        await save_all(saver, 2)


def test_last_version_is_saved_whatever_the_interval(tmp_path: Path) -> None:
    saver, _, _ = saving(tmp_path, every=0)
    assert [version for version in range(1, 8) if saver.is_due(version)] == [7]
    saver, _, _ = saving(tmp_path, every=3, keep_every=4)
    assert [version for version in range(1, 8) if saver.is_due(version)] == [3, 4, 6, 7]


async def test_checkpoint_whose_removal_was_cut_short_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, _, _ = saving(tmp_path, keep=1)
    await save_all(saver, 2)

    def killed(folder: Path, ignore_errors: bool = False) -> None:
        if folder.exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoints.shutil, "rmtree", killed)
        checkpoints.remove(tmp_path / "checkpoints/v000002")
    assert newest(tmp_path) is None
    assert list((tmp_path / "checkpoints").iterdir())  # its bytes are still there,
    await saver.sweep()
    assert not list((tmp_path / "checkpoints").iterdir())  # and not for good


async def test_what_a_killed_save_has_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    saver, _, _ = saving(tmp_path)
    await save_all(saver, 2)
    folder = tmp_path / "checkpoints"
    (folder / "v000004.partial/megatron.partial").mkdir(parents=True)
    (folder / "mine.partial").mkdir()
    await saver.sweep()
    assert sorted(path.name for path in folder.iterdir()) == ["mine.partial", "v000002"]


async def test_copy_of_a_checkpoint_is_neither_continued_from_nor_removed(tmp_path: Path) -> None:
    saver, _, _ = saving(tmp_path, keep=1)
    await save_all(saver, 2)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "v000002", folder / "v000002-best")
    shutil.copytree(folder / "v000002", folder / "vbest")
    await save_all(saver, 4)
    assert names(tmp_path) == ["v000004"]
    assert (folder / "v000002-best" / "COMPLETE").exists()
    saved = newest(tmp_path)
    assert saved is not None and saved.version == 4
