"""A group file that is broken in any way is refused by its name."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from megarl.buffer.groupfile import read_group, write_group
from megarl.errors import DataError
from megarl.types import Group, Prompt, Sample
from tests.hostile import SEEDED, hurt


def good(folder: Path) -> Path:
    prompt = Prompt("p", (1, 2), "", "")
    sample = Sample("s", "g", "p", (1, 2)).extended([5, 6], [-0.5, -1.0], version=3)
    return Path(write_group(folder, Group("g", prompt, (sample, sample))))


def check(path: Path) -> None:
    try:
        group = read_group(path)
    except DataError as error:
        assert str(path) in str(error)
        return
    assert sum(len(group.sample(i).tokens) for i in range(len(group))) == len(group.tokens)


@SEEDED
@given(st.data())
def test_any_header_of_a_group_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    path = good(tmp_path)
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header: Any = json.loads(raw[8 : 8 + length])
    changed = json.dumps(data.draw(hurt(header))).encode()
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + raw[8 + length :])
    check(path)


@SEEDED
@given(st.binary(min_size=1, max_size=8), st.integers(0, 900), st.booleans())
def test_any_bytes_in_a_group_are_read_or_refused(
    tmp_path: Path, bad: bytes, at: int, is_cut: bool
) -> None:
    path = good(tmp_path)
    raw = path.read_bytes()
    path.write_bytes(raw[:at] if is_cut else raw[:at] + bad + raw[at + len(bad) :])
    check(path)
