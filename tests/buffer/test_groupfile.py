"""The group file: what is written is read back, and a broken file says so."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megarl.buffer.groupfile import read_group, write_group
from megarl.errors import DataError, ShapeError
from megarl.types import Group, Prompt, Sample

METADATA = {
    "format": "megarl-group-1",
    "group_id": "g",
    "prompt_id": "p",
    "sample_ids": '["s0", "s1"]',
}


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
    save_file({"tokens": np.zeros(3, np.int32)}, tmp_path / "x.safetensors")
    with pytest.raises(DataError, match="not a whole group file"):
        read_group(tmp_path / "x.safetensors")


@pytest.mark.parametrize("group_id", ["../escape", "z/a", "a/z", ""])
def test_group_id_with_a_separator_is_refused(tmp_path: Path, group_id: str) -> None:
    with pytest.raises(DataError, match="file name"):
        write_group(tmp_path, two_sample_group(group_id))


def test_sample_without_a_prompt_is_read_back(tmp_path: Path) -> None:
    sample = Sample("s0", "g", "p", ()).extended([9], [-0.25], version=2)
    read = read_group(write_group(tmp_path, Group("g", Prompt("p", (), "", ""), (sample,))))
    assert (read.sample(0).tokens.tolist(), read.sample(0).prompt_length) == ([9], 0)


def test_sample_with_parts_out_of_step_is_refused(tmp_path: Path) -> None:
    prompt = Prompt("p", (1,), "", "")
    broken = Sample("s", "g", "p", (1,), response_ids=(2, 3), loss_mask=(True,))
    with pytest.raises(ShapeError, match="s: 2 response tokens"):
        write_group(tmp_path, Group("g", prompt, (broken,)))


@pytest.mark.parametrize("num_samples", [1, 2, 3, 4])
def test_group_of_any_size_is_read_back_row_by_row(tmp_path: Path, num_samples: int) -> None:
    samples = tuple(
        Sample(f"s{i}", "g", "p", (1, 2)).extended([i] * i, [-0.5] * i, version=i)
        for i in range(num_samples)
    )
    read = read_group(write_group(tmp_path, Group("g", Prompt("p", (1, 2), "", ""), samples)))
    rows = [read.sample(i) for i in range(len(read))]
    assert [row.tokens.tolist() for row in rows] == [[1, 2] + [i] * i for i in range(num_samples)]


@pytest.mark.parametrize("index", [-1, 2])
def test_row_outside_of_the_group_is_an_index_error(tmp_path: Path, index: int) -> None:
    read = read_group(write_group(tmp_path, two_sample_group()))
    with pytest.raises(IndexError, match=f"2 samples, not a row {index}"):
        read.sample(index)


def test_groups_and_rows_are_told_apart_by_identity_since_arrays_have_no_one_equality(
    tmp_path: Path,
) -> None:
    path = write_group(tmp_path, two_sample_group())
    first, second = read_group(path), read_group(path)
    assert first == first and first != second
    assert first.sample(0) != second.sample(0)


def test_group_file_lies_in_a_new_folder_and_may_be_read_by_all(tmp_path: Path) -> None:
    path = Path(write_group(tmp_path / "run" / "rollouts", two_sample_group()))
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_write_that_fails_leaves_nothing_and_keeps_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "v0-g3.safetensors").mkdir()
    with pytest.raises(IsADirectoryError):
        write_group(tmp_path, two_sample_group())
    assert [path.name for path in tmp_path.iterdir()] == ["v0-g3.safetensors"]


@pytest.mark.parametrize(
    "changed",
    [
        {"format": "megarl-group-0"},
        {"format": "megarl-group-2"},
        {"format": None},
        {"group_id": None},
        {"prompt_id": None},
        {"sample_ids": None},
        {"sample_ids": "s0, s1"},
    ],
    ids=str,
)
def test_file_with_all_tensors_but_other_metadata_is_refused(
    tmp_path: Path, changed: dict[str, str | None]
) -> None:
    path = write_group(tmp_path, two_sample_group())
    save_file(load_file(path), path, metadata=METADATA)
    assert read_group(path).sample_ids == ("s0", "s1")
    metadata = {key: value for key, value in {**METADATA, **changed}.items() if value is not None}
    save_file(load_file(path), path, metadata=metadata)
    with pytest.raises(DataError, match="not a whole group file"):
        read_group(path)


def save_with(path: str, **arrays: np.ndarray) -> None:
    """The same file with some arrays replaced."""
    save_file({**load_file(path), **arrays}, path, metadata=METADATA)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("tokens", [1] * 9),
        ("tokens", [1] * 11),
        ("loss_mask", [0] * 9),
        ("loss_mask", [0] * 11),
        ("behavior_logprobs", [0.0] * 9),
        ("behavior_logprobs", [0.0] * 11),
        ("versions", [0] * 9),
        ("versions", [0] * 11),
        ("offsets", [0, 10]),
        ("offsets", [0, 6, 10, 10]),
        ("offsets", [-1, 6, 10]),
        ("offsets", [1, 6, 10]),
        ("offsets", [0, 6, 9]),
        ("offsets", [0, 6, 11]),
        ("offsets", [0, 2, 10]),
        ("offsets", [0, 8, 10]),
        ("prompt_lengths", [3]),
        ("prompt_lengths", [3, 3, 3]),
        ("prompt_lengths", [3, -1]),
        ("prompt_lengths", [7, 3]),
    ],
    ids=str,
)
def test_file_with_one_array_that_does_not_fit_the_others_is_refused(
    tmp_path: Path, name: str, values: list[float]
) -> None:
    path = write_group(tmp_path, two_sample_group())
    save_with(path)
    assert read_group(path).sample_ids == ("s0", "s1")
    save_with(path, **{name: np.array(values, load_file(path)[name].dtype)})
    with pytest.raises(DataError, match=r"tokens; delete|do not fit 2 samples"):
        read_group(path)


@pytest.mark.parametrize("name", ["tokens", "offsets", "versions"])
def test_file_with_an_array_of_another_type_or_shape_is_refused(tmp_path: Path, name: str) -> None:
    path = write_group(tmp_path, two_sample_group())
    array = load_file(path)[name]
    for other in (array.astype(np.float64), array.reshape(1, -1)):
        save_with(path, **{name: other})
        with pytest.raises(DataError, match=f"{name} is {other.dtype} "):
            read_group(path)


def test_sample_with_more_mask_logprobs_and_versions_than_tokens_is_refused(tmp_path: Path) -> None:
    prompt = Prompt("p", (1,), "", "")
    whole = Sample("s", "g", "p", (1,)).extended([2, 3], [0.0, 0.0], version=1)
    with pytest.raises(ShapeError, match="s: 1 response tokens with 2 mask entries, 2 log-probs"):
        write_group(tmp_path, Group("g", prompt, (replace(whole, response_ids=(2,)),)))


def test_sample_with_fewer_versions_than_tokens_is_refused(tmp_path: Path) -> None:
    prompt = Prompt("p", (1,), "", "")
    whole = Sample("s", "g", "p", (1,)).extended([2, 3], [0.0, 0.0], version=1)
    short = replace(whole, version_spans=(replace(whole.version_spans[0], end=1),))
    with pytest.raises(ShapeError, match="s: 2 response tokens .* and version spans"):
        write_group(tmp_path, Group("g", prompt, (short,)))


@pytest.mark.parametrize("start", [1, 3])
def test_version_spans_that_overlap_or_leave_a_gap_are_refused(tmp_path: Path, start: int) -> None:
    prompt = Prompt("p", (1,), "", "")
    whole = Sample("s", "g", "p", (1,)).extended([2, 3], [0.0, 0.0], version=1)
    whole = whole.extended([4], [0.0], version=2)
    first, second = whole.version_spans
    moved = replace(whole, version_spans=(first, replace(second, start=start)))
    with pytest.raises(ShapeError, match="leave a gap or overlap at response token 2"):
        write_group(tmp_path, Group("g", prompt, (moved,)))
