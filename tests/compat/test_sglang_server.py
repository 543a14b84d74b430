"""SGLang's processes are prepared before it is imported, and end with what started them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megarl.compat import (
    SGLANG_VERSION,
    sglang_attention_dp,
    sglang_deepseek_config,
    sglang_expert_parallel,
    sglang_float8,
    sglang_fork,
    sglang_latent_attention,
    sglang_paused,
)

# What multiprocessing does in each process that SGLang spawns, then what a scheduler imports.
AS_A_SPAWNED_CHILD = """
import json, multiprocessing.spawn, os, sys
sys.argv = ["sglang_server.py", "--device", sys.argv[1]]
multiprocessing.spawn._fixup_main_from_name("megarl.compat.sglang_server")
hidden = sys.modules.get("megatron", "absent") is None
placed = [n for n in ("triton", "torchvision", "sgl_kernel") if n in sys.modules]
loader = ""
if sys.argv[2] == "cpu":
    import torch.storage
    import sglang.srt.debug_utils.dumper
    loader = torch.storage._load_from_bytes.__module__
print(json.dumps([hidden, loader, placed, os.environ.get("SGLANG_USE_CPU_ENGINE")]))
"""


def as_a_spawned_child(device: str) -> list[object]:
    run = subprocess.run(
        [sys.executable, "-c", AS_A_SPAWNED_CHILD, device],
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[object] = json.loads(run.stdout.splitlines()[-1])
    return found


def test_spawned_cpu_child_sees_no_megatron_and_can_import_sglang() -> None:
    hidden, loader, _, cpu_engine = as_a_spawned_child("cpu")
    assert hidden
    assert loader == "torch.storage"  # megatron.core would have put its own there
    assert cpu_engine == "1"


def test_spawned_gpu_child_gets_no_cpu_substitution() -> None:
    hidden, _, placed, cpu_engine = as_a_spawned_child("cuda")
    assert hidden
    assert placed == []
    assert cpu_engine is None


WAITING = """
import sys
from megarl.compat import after_import, sglang_server
sglang_server.prepare_process(sys.argv)
print(*after_import._FINDER.changes)
"""


def test_cures_of_model_families_wait_in_cpu_servers_only() -> None:
    def waiting(device: str) -> list[str]:
        argv = [sys.executable, "-c", WAITING, "--device", device]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()

    cures = (
        sglang_attention_dp,
        sglang_deepseek_config,
        sglang_expert_parallel,
        sglang_fork,
        sglang_latent_attention,
        sglang_paused,
    )
    modules = [cure.MODULE for cure in cures]
    modules += [sglang_float8.QUANTIZATION, sglang_float8.LATENT]
    assert sorted(waiting("cpu")) == sorted(modules)
    assert waiting("cuda") == []


def test_installed_engine_is_the_one_that_every_cure_is_for() -> None:
    from importlib.metadata import version

    assert version("sglang") == SGLANG_VERSION


def test_server_ends_when_the_process_that_started_it_is_killed(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time; "
        "p = subprocess.Popen([sys.executable, '-m', 'megarl.compat.sglang_server', "
        f"'--model-path', {str(tmp_path)!r}, '--device', 'cpu'], "
        "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL); "
        "print(p.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    server = int(parent.stdout.readline())
    time.sleep(1.5)  # long enough to have told the kernel, too short to end by itself
    assert is_running(server)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 3
    while is_running(server) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(server)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (ProcessLookupError, FileNotFoundError):
        return False
