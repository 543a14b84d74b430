"""A CPU server's processes are forked where that is safe, and spawned where it is not."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.compat import sglang_fork

SET_UP = """
import multiprocessing, threading, types
from megarl.compat import sglang_fork

if {threads} > 1:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
engine = types.SimpleNamespace(
    _set_envs_and_config=lambda arguments: multiprocessing.set_start_method("spawn", force=True)
)
sglang_fork._wrap(engine)
engine._set_envs_and_config(types.SimpleNamespace(numa_node={numa_node}))
print(multiprocessing.get_start_method(), flush=True)
if multiprocessing.get_start_method() == "fork":
    child = multiprocessing.Process(target=lambda: print(multiprocessing.get_start_method()))
    child.start()
    child.join()
"""


@pytest.mark.parametrize(
    ("threads", "numa_node", "expected"),
    [
        pytest.param(1, None, ["fork", "spawn"], id="one thread; its child spawns again"),
        pytest.param(2, None, ["spawn"], id="two threads"),
        pytest.param(1, [0], ["spawn"], id="bound to NUMA nodes"),
    ],
)
def test_start_method_is_fork_only_where_nothing_is_lost_by_it(
    threads: int, numa_node: list[int] | None, expected: list[str]
) -> None:
    code = SET_UP.format(threads=threads, numa_node=numa_node)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == expected


KILLED = """
import os, signal, time
child = multiprocessing.Process(target=time.sleep, args=(60,))
child.start()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_child_of_a_server_that_is_killed_ends_with_it() -> None:
    code = SET_UP.format(threads=1, numa_node=None) + KILLED
    # it returns when nobody has the pipe any more
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert run.returncode == -9
    assert run.stdout.split() == ["fork", "spawn"]


def test_engine_has_the_function_that_is_wrapped_and_spawns_by_itself() -> None:
    sglang = importlib.util.find_spec("sglang")  # its own import would take seconds
    assert sglang is not None and sglang.submodule_search_locations
    *folders, name = sglang_fork.MODULE.split(".")[1:]
    root = Path(sglang.submodule_search_locations[0])
    source = root.joinpath(*folders, f"{name}.py").read_text()
    _, found, rest = source.partition("\ndef _set_envs_and_config(")
    assert found
    assert 'mp.set_start_method("spawn", force=True)' in rest.partition("\ndef ")[0]
