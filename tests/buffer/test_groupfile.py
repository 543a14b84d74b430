"""The group file: what is written is read back, and a broken file says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megarl.buffer.groupfile import read_group, write_group
from megarl.errors import DataError, ShapeError
from megarl.types import Group, Prompt, Sample


def two_sample_group(group_id: str = "v0-g3") -> Group:
    prompt = Prompt("p7", (1, 2, 3), "text", "answer")
    first = Sample("s0", group_id, "p7", prompt.prompt_ids).extended(
        [4, 5], [-0.5, -1.5], version=2
    )
    first = first.extended([6], [0.0], version=3, trainable=False)
    second = Sample("s1", group_id, "p7", prompt.prompt_ids).extended([9], [-0.25], version=2)
    return Group(group_id, prompt, (first, second))


def test_group_read_back_has_every_token_mask_logprob_and_version(tmp_path: Path) -> None:
    read = read_group(write_group(tmp_path / "rollouts", two_sample_group()))
    assert (read.group_id, read.prompt_id, read.sample_ids) == ("v0-g3", "p7", ("s0", "s1"))
    first, second = read.sample(0), read.sample(1)
    assert first.tokens.tolist() == [1, 2, 3, 4, 5, 6] and first.prompt_length == 3
    assert first.loss_mask.tolist() == [0, 0, 0, 1, 1, 0]
    assert first.behavior_logprobs.tolist() == [0, 0, 0, -0.5, -1.5, 0]
    assert first.versions.tolist() == [-1, -1, -1, 2, 2, 3]
    assert second.tokens.tolist() == [1, 2, 3, 9] and second.sample_id == "s1"
    assert read.tokens.dtype == np.int32 and read.offsets.tolist() == [0, 6, 10]


def test_writing_leaves_only_the_group_file(tmp_path: Path) -> None:
    for _ in range(2):
        write_group(tmp_path, two_sample_group())
    assert [path.name for path in tmp_path.iterdir()] == ["v0-g3.safetensors"]


def test_truncated_group_file_is_a_data_error_naming_it(tmp_path: Path) -> None:
    path = Path(write_group(tmp_path, two_sample_group()))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match=str(path)):
        read_group(path)


def test_missing_group_file_is_a_data_error_naming_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent"):
        read_group(tmp_path / "absent.safetensors")


def test_other_safetensors_file_is_not_taken_for_a_group(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"tokens": np.zeros(3, np.int32)}, tmp_path / "x.safetensors")
    with pytest.raises(DataError, match="not a whole group file"):
        read_group(tmp_path / "x.safetensors")


def test_group_id_with_a_separator_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="file name"):
        write_group(tmp_path, two_sample_group("../escape"))


def test_sample_with_parts_out_of_step_is_refused(tmp_path: Path) -> None:
    prompt = Prompt("p", (1,), "", "")
    broken = Sample("s", "g", "p", (1,), response_ids=(2, 3), loss_mask=(True,))
    with pytest.raises(ShapeError, match="s: 2 response tokens"):
        write_group(tmp_path, Group("g", prompt, (broken,)))
