"""The newest checkpoint without damage is continued from, and damaged ones are told of."""

import asyncio
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given

from megarl.controller.resume import newest, whole_checkpoints
from megarl.controller.training import restore_newest
from megarl.errors import CheckpointError
from megarl.observe.metrics import MetricsLog
from megarl.observe.progress import Progress
from tests.hostile import SEEDED, hurt


def write(run_dir: Path, version: int) -> Path:
    """A checkpoint of one file beside its list."""
    folder = run_dir / "checkpoints" / f"v{version:06d}"
    (folder / "megatron").mkdir(parents=True)
    (folder / "megatron/shard").write_bytes(bytes(version))
    (folder / "megatron/files.json").write_text(json.dumps({"shard": f"{version} 9f31c2"}))
    state = {"version": version, "prompts": {"position": version}, "metrics": {}}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "COMPLETE").touch()
    return folder


class Loading:
    """A learner, and a prompt source, of a run that begins. `bad` are versions that fail checks."""

    def __init__(self, *bad: int) -> None:
        self.bad, self.loaded, self.position = bad, 0, -1

    async def check_saved(self, path: Path) -> str:
        is_bad = int(path.parent.name[1:]) in self.bad
        return f"{path}: 1 of 2 files are not as they were saved" if is_bad else ""

    async def load(self, path: str) -> int:
        self.loaded = int(Path(path).parent.name[1:])
        return self.loaded

    def restore(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    async def sweep(self) -> None:
        pass


def restored(run_dir: Path, learner: Loading) -> str:
    """What is told while a run finds its checkpoint."""
    told = io.StringIO()
    loop = SimpleNamespace(
        learner=learner,
        prompts=learner,
        checkpoints=learner,
        exports=learner,
        metrics=MetricsLog(run_dir),
        progress=Progress(9, told),
    )
    asyncio.run(restore_newest(cast(Any, loop), run_dir))
    return told.getvalue()


def test_run_without_a_checkpoint_starts_anew(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    learner = Loading()
    assert restored(tmp_path, learner) == "" and learner.position == -1


def test_undamaged_newest_checkpoint_is_loaded_and_nothing_is_said(tmp_path: Path) -> None:
    write(tmp_path, 2)
    write(tmp_path, 4)
    learner = Loading()
    assert restored(tmp_path, learner) == ""
    assert (learner.loaded, learner.position) == (4, 4)


def test_damaged_checkpoint_is_set_aside_with_one_line_for_the_one_before(tmp_path: Path) -> None:
    for version in (2, 4, 6):
        write(tmp_path, version)
    learner = Loading(6)
    told = restored(tmp_path, learner)
    assert (learner.loaded, learner.position) == (4, 4)
    folder = tmp_path / "checkpoints"
    assert told == (
        f"{folder}/v000006/megatron: 1 of 2 files are not as they were saved. It is now "
        f"{folder}/v000006.damaged; continuing from v000004\n"
    )
    assert [path.name for path in whole_checkpoints(folder)] == ["v000002", "v000004"]


@pytest.mark.parametrize(
    "harm", ["short", "long", "gone", "no list", "broken list", "broken state"]
)
def test_harm_that_shows_without_reading_weights_is_seen_at_once(tmp_path: Path, harm: str) -> None:
    write(tmp_path, 2)
    folder = write(tmp_path, 4)
    listed = folder / "megatron/files.json"
    match harm:
        case "short":
            (folder / "megatron/shard").write_bytes(bytes(3))
        case "long":
            (folder / "megatron/shard").write_bytes(bytes(5))
        case "gone":
            (folder / "megatron/shard").unlink()
        case "no list":
            listed.write_text("")
        case "broken list":
            listed.write_text('{"shard": ""}')
        case _:
            (folder / "state.json").write_text("{")
    saved = newest(tmp_path)
    assert saved is not None and saved.version == 2
    learner = Loading()
    assert "v000004" in restored(tmp_path, learner)
    assert learner.loaded == 2


def test_run_whose_checkpoints_are_all_damaged_does_not_start_anew(tmp_path: Path) -> None:
    write(tmp_path, 2)
    (write(tmp_path, 4) / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"none of 2 .*v000004/state.json: .*remove them"):
        restored(tmp_path, Loading(2))
    assert len(whole_checkpoints(tmp_path / "checkpoints")) == 2
    (tmp_path / "checkpoints/v000002/megatron/shard").unlink()
    with pytest.raises(CheckpointError, match=r"none of 2 .*v000002/megatron/shard: No such file"):
        newest(tmp_path)


def test_version_of_seven_digits_is_newer_than_one_of_six(tmp_path: Path) -> None:
    for version in (999_999, 1_000_000):
        folder = tmp_path / f"v{version:06d}"
        folder.mkdir()
        (folder / "COMPLETE").touch()
    assert whole_checkpoints(tmp_path)[-1].name == "v1000000"


STATE = {"version": 4, "prompts": {"pass": 0, "position": 3}, "metrics": {"reward/mean": 0.5}}


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
