"""A temp folder for each process tree of a run, so that what is left there can go with the tree.

Owns where it is, and that programs find it (TMPDIR). SGLang makes files for its sockets in the temp
folder, wandb folders; neither removes them when it is killed. Knows nothing of runs.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import tempfile
from collections.abc import Iterator, MutableMapping
from pathlib import Path

SHORT = "/tmp"
LONGEST_SOCKET = 107  # bytes of a Unix socket's path, man 7 unix
LONGEST_INSIDE = 48  # such as wandb_symon-15869-15904-1796070055804.sock


def make_temp_folder(prefix: str, environ: MutableMapping[str, str]) -> Path:
    """A new folder whose name begins with `prefix`, and which `environ` names as the temp folder.

    It is in the user's own, or in /tmp where sockets in it would have too long a path. What torch
    compiles stays outside, where the next run finds it. Raises OSError.
    """
    usual = tempfile.gettempdir()
    longest = os.path.join(usual, f"{prefix}abcdefgh")
    fits = len(os.fsencode(longest)) + LONGEST_INSIDE <= LONGEST_SOCKET
    folder = tempfile.mkdtemp(prefix=prefix, dir=usual if fits else SHORT)
    with contextlib.suppress(KeyError, OSError):  # a user without a name
        # As torch names it, _inductor/runtime/cache_dir_utils.py.
        compiled = os.path.join(usual, f"torchinductor_{getpass.getuser()}")
        environ.setdefault("TORCHINDUCTOR_CACHE_DIR", compiled)
    environ["TMPDIR"] = folder
    return Path(folder)


@contextlib.contextmanager
def own_temp_folder(prefix: str) -> Iterator[Path]:
    """A temp folder of this process inside, for what Python makes; it is removed after.

    Programs that are started meanwhile are not told of it: those of the run have their own.
    """
    before, folder = tempfile.tempdir, make_temp_folder(prefix, {})
    tempfile.tempdir = str(folder)
    try:
        yield folder
    finally:
        tempfile.tempdir = before
        shutil.rmtree(folder, ignore_errors=True)


def temp_folders(prefix: str) -> list[Path]:
    """The folders that were made with `prefix` on this node."""
    places = {tempfile.gettempdir(), os.environ.get("TMPDIR") or SHORT, SHORT}
    return sorted(folder for place in places for folder in Path(place).glob(f"{prefix}*"))
