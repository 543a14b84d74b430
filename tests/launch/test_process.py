import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarl.errors import LaunchError
from megarl.launch.process import descendants, describe_status, read_process, start
from tests.launch.waiting import are_gone, read_pids, until

FAMILY = str(Path(__file__).with_name("family.py"))


async def test_start_appends_the_output_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "echo.log"
    for word in ("one", "two"):
        process = await start("echo", ["sh", "-c", f"echo {word}; echo {word} >&2"], {}, log)
        assert await process.wait() == 0
    assert log.read_text().split() == ["one", "one", "two", "two"]


async def test_start_of_a_missing_program_is_a_launch_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="server-0: /no/python cannot be started"):
        await start("server-0", ["/no/python"], {}, tmp_path / "log")


async def test_return_code_of_a_killed_process_is_minus_its_signal(tmp_path: Path) -> None:
    killed = await start("direct", ["sleep", "60"], {}, tmp_path / "log")
    killed.signal(signal.SIGKILL)
    told = await start("through a shell", ["sh", "-c", "exit 137"], {}, tmp_path / "log")
    assert (await killed.wait(), await told.wait()) == (-9, -9)
    assert describe_status(-9) == "killed by SIGKILL"


async def test_closed_pipe_asks_a_process_to_end(tmp_path: Path) -> None:
    process = await start("cat", ["cat"], {}, tmp_path / "log")
    await asyncio.sleep(0.1)
    assert process.returncode is None
    process.ask_to_end()
    assert await asyncio.wait_for(process.wait(), 5) == 0


async def test_force_ends_a_tree_across_sessions(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = "import os, time\nif os.fork() == 0: os.setsid()\n"
    code += f"open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')\ntime.sleep(60)"
    process = await start("tree", [sys.executable, "-c", code], {}, tmp_path / "log")
    family = read_pids(pids, 2)
    assert {process.pid, *(p.pid for p in descendants(process.pid))} == set(family)
    process.force()
    assert await process.wait() == -9
    until(lambda: are_gone(family))


async def test_several_can_wait_for_one_process(tmp_path: Path) -> None:
    process = await start("short", ["sh", "-c", "sleep 0.1; exit 3"], {}, tmp_path / "log")
    assert await asyncio.gather(process.wait(), process.wait(), process.wait()) == [3, 3, 3]
    assert process.returncode == 3
    process.kill()
    process.force()


def test_death_signal_ends_a_child_whose_parent_is_killed(tmp_path: Path) -> None:
    code = f"""
import asyncio, pathlib, signal, time
from megarl.launch.process import start
async def main():
    process = await start("child", ["sleep", "60"], {{}}, pathlib.Path({str(tmp_path / "log")!r}),
                          death_signal=signal.SIGKILL)
    print(process.pid, flush=True)
    time.sleep(60)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert read_process(child) is not None
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: are_gone([child]), limit_s=3)


@pytest.mark.parametrize("ending", ["closed pipe", "SIGTERM", "command ends"])
def test_warden_leaves_nothing_of_its_command(tmp_path: Path, ending: str) -> None:
    pids = tmp_path / "pids"
    shm = Path(f"/dev/shm/test_{os.getpid()}_{time.monotonic_ns()}")
    argv = ["-m", "megarl.launch.warden", "--grace-s=0.2", "--", sys.executable, FAMILY]
    read, write = os.pipe()
    warden = subprocess.Popen([sys.executable, *argv, str(pids), str(shm)], stdin=read)
    os.close(read)
    family = read_pids(pids, 3)
    assert shm.exists()
    if ending == "SIGTERM":
        warden.terminate()
    elif ending == "command ends":
        command = next(p for p in descendants(warden.pid) if p.parent == warden.pid)
        time.sleep(2.5)  # its /dev/shm entries are looked for every 2 s
        os.kill(command.pid, signal.SIGKILL)
    else:  # what a killed controller does too: the kernel closes its end
        os.close(write)
    status = warden.wait(timeout=5)
    assert status == 128 + (signal.SIGKILL if ending == "command ends" else signal.SIGTERM)
    assert are_gone(family)
    assert not shm.exists()


@pytest.mark.parametrize("ending", ["closed pipe", "command is killed"])
def test_temp_folder_of_a_command_goes_with_it(ending: str) -> None:
    code = "import os, tempfile, time; print(os.getpid(), tempfile.mkstemp()[1], flush=True)"
    argv = [sys.executable, "-m", "megarl.launch.warden", "--", sys.executable, "-c"]
    pipe = subprocess.PIPE
    argv.append(f"{code}; time.sleep(60)")
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) as warden:
        assert warden.stdin is not None and warden.stdout is not None
        pid, path = warden.stdout.readline().split()
        folder = Path(path).parent
        assert folder.name.startswith("megarl_") and Path(path).exists()
        if ending == "closed pipe":
            warden.stdin.close()
        else:
            os.kill(int(pid), signal.SIGKILL)
        warden.wait(timeout=10)
    assert not folder.exists()


def test_warden_ends_with_its_commands_status() -> None:
    argv = [sys.executable, "-m", "megarl.launch.warden", "--"]
    for command, status in ((["sh", "-c", "exit 3"], 3), (["/no/program"], 127)):
        with subprocess.Popen([*argv, *command], stdin=subprocess.PIPE) as warden:
            assert warden.wait(timeout=10) == status


def test_command_dies_with_a_warden_that_is_killed(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "megarl.launch.warden", "--", "sleep", "60"]
    warden = subprocess.Popen(argv, stdin=subprocess.PIPE)
    until(lambda: descendants(warden.pid))
    command = descendants(warden.pid)[0].pid
    warden.kill()
    warden.wait()
    until(lambda: are_gone([command]), limit_s=3)
