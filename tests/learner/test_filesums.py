"""A checkpoint's files are noticed when they are not as they were saved, by one bit or whole."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from megarl.learner.filesums import FILES, damage, digests, write_digests


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A listed folder of two files, on the only rank of a process group."""
    folder = tmp_path / "megatron"
    folder.mkdir()
    (folder / ".metadata").write_bytes(b"names")
    (folder / "__0_0.distcp").write_bytes(bytes(1000))
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    write_digests(folder, digests(folder))
    yield folder
    dist.destroy_process_group()


def test_untouched_files_pass(folder: Path) -> None:
    assert damage(folder) == ""


def test_one_flipped_bit_is_refused_by_the_name_of_its_file(folder: Path) -> None:
    damaged = bytearray(1000)
    damaged[500] ^= 64
    (folder / "__0_0.distcp").write_bytes(damaged)
    assert re.search(r"1 of 2 files .* first __0_0.distcp: 1000 ", damage(folder))


def test_missing_file_is_refused_by_its_name(folder: Path) -> None:
    (folder / ".metadata").unlink()
    assert re.search(r"first .metadata: unreadable: No such file", damage(folder))


def test_file_that_cannot_be_read_back_is_not_listed_as_saved(folder: Path) -> None:
    (folder / "sub").mkdir()
    with pytest.raises(OSError, match="sub is unreadable: Is a directory"):
        write_digests(folder, digests(folder))


@pytest.mark.parametrize("text", [None, "", "{", "[1]"])
def test_list_that_cannot_be_read_is_refused(folder: Path, text: str | None) -> None:
    if text is None:
        (folder / FILES).unlink()
    else:
        (folder / FILES).write_text(text)
    assert re.search(r"files.json: cannot be read", damage(folder))
