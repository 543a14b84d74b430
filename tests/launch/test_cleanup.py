import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.launch.cleanup import SharedFile, present, sweep, sweep_run, used_by

HOLD = """
import mmap, sys
files = [open(path, "r+b") for path in sys.argv[2:]]
kept = [mmap.mmap(file.fileno(), 0) for file in files]
if sys.argv[1] == "map":
    [file.close() for file in files]
else:
    [mapping.close() for mapping in kept]
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def entry() -> Iterator[Path]:
    path = Path(f"/dev/shm/test_cleanup_{os.getpid()}")
    path.write_bytes(bytes(mmap.PAGESIZE))
    yield path
    path.unlink(missing_ok=True)


def holder(how: str, path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, how, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def shared(path: Path) -> SharedFile:
    return SharedFile(str(path), path.stat().st_ino)


@pytest.mark.parametrize("how", ["map", "open"])
def test_entry_is_swept_once_no_living_process_uses_it(entry: Path, how: str) -> None:
    with holder(how, entry) as process:
        assert used_by([process.pid]) == {shared(entry)}
        assert sweep([shared(entry)]) == []
        assert entry.exists()
        process.kill()
    assert sweep([shared(entry)]) == [str(entry)]
    assert not entry.exists()


def test_semaphore_is_known_by_the_process_that_holds_it() -> None:
    code = (
        "import multiprocessing as m, sys; l = m.get_context('spawn').Lock(); print(l._semlock.name"
    )
    code += ", flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        path = Path(f"/dev/shm/sem.{process.stdout.readline().strip().removeprefix('/')}")
        assert used_by([process.pid]) == {shared(path)}


def test_sweep_leaves_a_new_file_under_an_old_name(entry: Path) -> None:
    old = SharedFile(str(entry), entry.stat().st_ino + 1)
    assert sweep([old]) == []
    assert entry.exists()


def test_sweep_of_a_run_removes_its_entries_and_no_others(entry: Path) -> None:
    run = f"t{os.getpid()}"
    own = [Path(f"/dev/shm/megarl_{run}_g1_r{rank}") for rank in (0, 1)]
    other = Path(f"/dev/shm/megarl_{run}x_g1_r0")
    before = present()
    for path in (*own, other):
        path.write_bytes(b"0")
    try:
        assert sweep_run(run) == [str(path) for path in own]
        assert present() - before == {shared(other)}
    finally:
        other.unlink()
    assert entry.exists()


def test_sweep_of_an_impossible_run_id_removes_nothing(entry: Path) -> None:
    assert sweep_run("") == sweep_run("../x") == []
