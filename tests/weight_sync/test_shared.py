"""Arenas: who may open them, what they say of themselves, and that they go away."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megarl.errors import WeightSyncError
from megarl.weight_sync.transport import shared
from megarl.weight_sync.transport.shared import Arena, ArenaReader

RUN = f"shared{os.getpid()}"
DIGEST, OTHER = "a" * 64, "b" * 64
SHM = Path("/dev/shm")


def _entries() -> list[str]:
    return [path.name for path in SHM.glob(f"megarl_{RUN}_*")]


def test_full_shared_memory_is_told_with_what_is_needed_and_leaves_no_file() -> None:
    with pytest.raises(WeightSyncError, match=rf"needs {2**60 + 4096} bytes .* are free; give"):
        Arena(RUN, 0, 0, 2**60, DIGEST)
    assert _entries() == []


def test_what_the_owner_writes_the_reader_sees_with_its_stamp() -> None:
    arena = Arena(RUN, 0, 3, 256, DIGEST)
    reader = ArenaReader(arena.ref, DIGEST)
    assert reader.stamp == ""
    arena.data.view(torch.float32).copy_(torch.arange(64.0))
    arena.stamp("7.x")
    assert reader.stamp == "7.x"
    assert torch.equal(reader.data.view(torch.float32), torch.arange(64.0))
    assert (SHM / f"megarl_{RUN}_g0_r3").stat().st_mode & 0o777 == 0o600
    arena.close()
    assert _entries() == []
    assert reader.data[0] == 0  # a reader keeps what it has mapped


@pytest.mark.parametrize("num_bytes", [0, 1, 5000])
def test_kernel_that_cannot_populate_a_mapping_has_the_file_allocated(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    monkeypatch.setattr(shared, "_advise", lambda mapped, advice: False)
    arena = Arena(RUN, 0, 0, num_bytes, DIGEST)
    there = (SHM / f"megarl_{RUN}_g0_r0").stat()
    assert there.st_blocks * 512 >= there.st_size >= 4096 + num_bytes
    arena.data.fill_(7)
    reader = ArenaReader(arena.ref, DIGEST)
    assert reader.data.tolist() == [7] * num_bytes and reader.data.dtype == torch.uint8
    arena.close()


def test_arena_of_another_layout_or_nonce_or_size_is_refused() -> None:
    arena = Arena(RUN, 0, 0, 256, DIGEST)
    with pytest.raises(WeightSyncError, match="another layout or dtype"):
        ArenaReader(arena.ref, OTHER)
    with pytest.raises(WeightSyncError, match="stale or belongs to another run"):
        ArenaReader(dataclasses.replace(arena.ref, nonce="f" * 32), DIGEST)
    with pytest.raises(WeightSyncError, match="or more"):
        ArenaReader(dataclasses.replace(arena.ref, num_bytes=1 << 20), DIGEST)
    arena.close()


def test_name_that_is_no_arena_is_not_opened() -> None:
    arena = Arena(RUN, 0, 0, 64, DIGEST)
    for name in ("../../etc/passwd", "sem.x", ""):
        with pytest.raises(WeightSyncError, match="not the name of an arena"):
            ArenaReader(dataclasses.replace(arena.ref, name=name), DIGEST)
    arena.close()
    with pytest.raises(WeightSyncError, match="cannot name shared memory"):
        Arena("a/b", 0, 0, 64, DIGEST)


def test_missing_arena_says_whether_the_server_is_on_another_host() -> None:
    arena = Arena(RUN, 0, 0, 64, DIGEST)
    arena.close()
    with pytest.raises(WeightSyncError, match="the learner has ended"):
        ArenaReader(arena.ref, DIGEST)
    with pytest.raises(WeightSyncError, match="another host than the learner"):
        ArenaReader(dataclasses.replace(arena.ref, host="elsewhere"), DIGEST)


def test_arena_of_a_dead_owner_is_replaced_and_of_a_living_one_refused() -> None:
    code = (
        "import sys; from megarl.weight_sync.transport.shared import Arena;"
        f"a = Arena({RUN!r}, 5, 0, 64, {DIGEST!r}); print('made', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    owner = subprocess.Popen([sys.executable, "-c", code], **pipes)  # type: ignore[call-overload]
    assert owner.stdout.readline() == b"made\n"
    with pytest.raises(WeightSyncError, match="still running"):
        Arena(RUN, 5, 0, 64, DIGEST)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert _entries() == [f"megarl_{RUN}_g5_r0"]
    Arena(RUN, 5, 0, 64, DIGEST).close()
    assert _entries() == []


def test_process_that_ends_in_order_removes_its_arenas() -> None:
    code = (
        "from megarl.weight_sync.transport.shared import Arena;"
        f"a = Arena({RUN!r}, 6, 0, 64, {DIGEST!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert _entries() == []


def test_too_little_shared_memory_is_an_error_and_not_a_crash() -> None:
    free = os.statvfs(SHM)
    with pytest.raises(WeightSyncError, match="bytes of shared memory"):
        Arena(RUN, 7, 0, free.f_blocks * free.f_frsize * 2, DIGEST)
    assert _entries() == []
