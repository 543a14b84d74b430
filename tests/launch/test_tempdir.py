"""Temp folders of process trees: where they are, and what stays outside."""

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.launch.cleanup import run_prefix, sweep_run
from megarl.launch.tempdir import make_temp_folder, own_temp_folder


@pytest.fixture
def usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's temp folder, with a short path."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_folder_is_named_to_programs_and_what_torch_compiles_stays_outside(usual: Path) -> None:
    environ: dict[str, str] = {}
    folder = make_temp_folder("megarl_r_", environ)
    assert folder.parent == usual and environ["TMPDIR"] == str(folder)
    assert Path(environ["TORCHINDUCTOR_CACHE_DIR"]).parent == usual
    given = {"TORCHINDUCTOR_CACHE_DIR": "/cache"}
    make_temp_folder("megarl_r_", given)
    assert given["TORCHINDUCTOR_CACHE_DIR"] == "/cache"


def test_sockets_have_room_however_long_the_users_own_path_is(usual: Path, monkeypatch) -> None:
    deep = usual / ("d" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = make_temp_folder(run_prefix("1130-004512-9f31c2"), {})
    try:
        inside = folder / "pymp-abcdefgh"
        inside.mkdir()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(inside / "listener-abcdefgh"))
    finally:
        assert sweep_run("1130-004512-9f31c2") == [str(folder)]
    assert not folder.exists()


def test_sweep_of_a_run_removes_its_temp_folders_and_no_others(usual: Path) -> None:
    run = f"t{os.getpid()}"
    own = [make_temp_folder(run_prefix(run), {}) for _ in range(2)]
    (own[0] / "file").touch()
    other = make_temp_folder(run_prefix(f"{run}x"), {})
    assert sweep_run(run) == sorted(map(str, own))
    assert list(usual.iterdir()) == [other]


def test_own_folder_holds_what_python_makes_inside_and_goes_after(usual: Path) -> None:
    with own_temp_folder("megarl_r_") as folder:
        made = Path(tempfile.mkdtemp())
        assert made.parent == folder and folder.parent == usual
    assert tempfile.gettempdir() == str(usual)
    assert list(usual.iterdir()) == []
