"""The format of a folder, and folders that have none."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.convert.formats import find
from megarl.errors import CheckpointError


def touch(folder: Path, *names: str, text: str = "{}") -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


MEGATRON = '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'


def megatron(folder: Path, **names: str) -> Path:
    touch(folder, ".metadata", "__0_0.distcp")
    return touch(folder, "metadata.json", text=MEGATRON)


def test_hugging_face_is_known_by_its_weights(tmp_path: Path) -> None:
    touch(tmp_path, "model.safetensors", "config.json")
    found = find(tmp_path)
    assert (found.format, found.path, found.model) == ("hf", tmp_path, tmp_path)


def test_megatron_is_known_by_its_metadata_and_takes_the_config_beside_it(tmp_path: Path) -> None:
    megatron(tmp_path)
    assert (find(tmp_path).format, find(tmp_path).model) == ("torch_dist", None)
    assert find(tmp_path, "elsewhere").model == Path("elsewhere")
    touch(tmp_path, "config.json")
    assert find(tmp_path).model == tmp_path


def test_newest_iteration_of_megatron_lm_is_taken(tmp_path: Path) -> None:
    megatron(tmp_path / "iter_0000020")
    megatron(tmp_path / "release")
    touch(tmp_path, "latest_checkpointed_iteration.txt", text="20\n")
    assert find(tmp_path).path == tmp_path / "iter_0000020"
    touch(tmp_path, "latest_checkpointed_iteration.txt", text="release")
    assert find(tmp_path).path == tmp_path / "release"
    (tmp_path / "loop").symlink_to(tmp_path)
    for text in ("30", "../20", "", "..", ".", "loop", "9" * 5000):
        touch(tmp_path, "latest_checkpointed_iteration.txt", text=text)
        with pytest.raises(CheckpointError, match="no such iteration"):
            find(tmp_path)


def test_checkpoint_of_a_run_is_of_the_model_in_its_settings(tmp_path: Path) -> None:
    saved = tmp_path / "checkpoints" / "v000012"
    megatron(saved / "megatron")
    with pytest.raises(CheckpointError, match="has no COMPLETE"):
        find(saved)
    touch(saved, "COMPLETE")
    assert find(saved).model is None
    touch(tmp_path, "config.toml", text='actor = { model = "/models/qwen" }')
    assert find(saved).model == Path("/models/qwen")
    assert find(saved, "other").model == Path("other")
    touch(tmp_path, "config.toml", text="actor = 3")
    with pytest.raises(CheckpointError, match="--model"):
        find(saved)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((), "it has nothing"),
        (("pytorch_model.bin",), "it has pytorch_model.bin"),
        (("mp_rank_00/model_optim_rng.pt",), "--ckpt-convert-format torch_dist"),
        (("mp_rank_00_001/model_optim_rng.pt",), "mp_rank_"),
        ((".metadata",), "has no metadata.json: its save has not ended"),
        (("metadata.json",), "has no .metadata"),
        ((".metadata", "metadata.json"), "only 'torch_dist' is read"),
    ],
)
def test_folder_without_a_whole_checkpoint_is_refused(
    names: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=words):
        find(touch(tmp_path, *names))


def test_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        find(tmp_path / "nothing")
    touch(tmp_path, "file")
    with pytest.raises(CheckpointError, match="is a file"):
        find(tmp_path / "file")


def test_conversion_that_has_not_ended_is_no_checkpoint(tmp_path: Path) -> None:
    touch(tmp_path, "model.safetensors", "config.json")
    touch(tmp_path, "conversion.json", text='{"finished": false}')
    with pytest.raises(CheckpointError, match="has not ended"):
        find(tmp_path)
    touch(tmp_path, "conversion.json", text='{"finished": true}')
    assert find(tmp_path).format == "hf"


def test_folder_of_a_run_is_answered_with_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    for version in ("v000009", "v000010", "v000011"):
        touch(tmp_path / "checkpoints" / version, "state.json")
    touch(tmp_path / "checkpoints" / "v000009", "COMPLETE")
    touch(tmp_path / "checkpoints" / "v000010", "COMPLETE")
    for folder in (tmp_path, tmp_path / "checkpoints"):
        with pytest.raises(CheckpointError, match=r"such as .*/checkpoints/v000010$"):
            find(folder)
