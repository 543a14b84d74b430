"""Megatron-Core, imported once: the programs that tests run on it are forks of that process.

    python -m tests.megatron_engine FD

The import takes seven seconds of a core, and tests need it in many processes, as learners of one to
four ranks. A fork has the engine as the import left it, and shares nothing with other forks. Ranks
that megarl's launcher starts through torch's, in `tests/learner/running.py` and in whole runs,
import their own.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from megarl.linux import set_death_signal

ROOT = Path(__file__).parents[1]
ANSWER_S = 560.0  # the import, and one answer of a program that is asked
TOLD_CHARACTERS = 20000  # of what a process wrote that ended badly


class Engine:
    """The process that has imported Megatron, from the side of the tests."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="engine"))  # a socket's path must be short
        self._num_runs = 0
        environment = {k: v for k, v in os.environ.items() if not k.startswith("NVTE_")}
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with (
            socket.socket(socket.AF_UNIX) as listener,
            (self._folder / "log").open("wb") as log,
        ):
            listener.bind(str(self._folder / "socket"))
            listener.listen()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.megatron_engine", str(listener.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=environment,
                pass_fds=[listener.fileno()],
            )

    def run(self, program: str, *arguments: object, ranks: int = 1, limit_s: float = 560.0) -> str:
        """What rank 0 of a module printed, once its `main()` has returned on every rank.

        A rank finds in its environment what torchrun would put there. Raises AssertionError with
        what a rank wrote that ended badly, TimeoutError after `limit_s`.
        """
        self._num_runs += 1
        folder = self._folder / str(self._num_runs)
        folder.mkdir()
        with self._ask(limit_s, program, arguments, ranks, folder) as answer:
            line = answer.readline()
        assert line, f"{program}: {(self._folder / 'log').read_text()[-TOLD_CHARACTERS:]}"
        wrong = {rank: code for rank, code in enumerate(json.loads(line)) if code}
        assert not wrong, "\n".join(
            f"rank {rank} of {program} ended with {code}: "
            f"{(folder / f'{rank}.err').read_text()[-TOLD_CHARACTERS:]}"
            for rank, code in wrong.items()
        )
        return (folder / "0.out").read_text()

    def start(self, program: str, *arguments: object) -> IO[str]:
        """One process of a module; what is written here is its input, and its output is read."""
        return self._ask(ANSWER_S, program, arguments)

    def _ask(
        self,
        limit_s: float,
        program: str,
        arguments: Sequence[object],
        ranks: int = 0,
        folder: Path = ROOT,
    ) -> IO[str]:
        words = [str(argument) for argument in arguments]
        with socket.socket(socket.AF_UNIX) as here:
            here.settimeout(limit_s)
            here.connect(str(self._folder / "socket"))
            both = here.makefile("rw")
        both.write(json.dumps([program, words, ranks, str(folder)]) + "\n")
        both.flush()
        return both

    def close(self) -> None:
        """End it, and with it all that it has forked."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder)


def main(fd: int) -> None:
    """Serve until killed; in a fork, run what it is for."""
    set_death_signal(signal.SIGKILL)
    from megarl.compat import megatron_cpu

    megatron_cpu.install()
    from megarl.learner import checkpoint, critic, learner, offload, passes  # noqa: F401

    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose all threads but one"
    gc.collect()
    gc.freeze()
    listener = socket.socket(fileno=fd)
    program, arguments = _serve(listener)
    sys.argv = [program, *arguments]
    importlib.import_module(program).main()


def _serve(listener: socket.socket) -> tuple[str, list[str]]:
    """Answer calls; it returns in forks, with the module that they run and its arguments."""
    while True:
        call, _ = listener.accept()
        with suppress(ChildProcessError):  # there is none
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork():
            call.close()
            continue
        set_death_signal(signal.SIGKILL)
        listener.close()
        order = b""
        while not order.endswith(b"\n"):
            order += call.recv(1)  # and no byte of what follows
        program, arguments, ranks, folder = json.loads(order)
        if ranks:
            _be_one_of(ranks, Path(folder), call)
        else:
            os.dup2(call.fileno(), 0)
            os.dup2(call.fileno(), 1)
        call.close()
        return program, arguments


def _be_one_of(ranks: int, folder: Path, call: socket.socket) -> None:
    """Fork so many ranks; it returns in them. Where one fails the others end too."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    pids: dict[int, int] = {}  # by pidfd
    for rank in range(ranks):
        pid = os.fork()
        if not pid:
            set_death_signal(signal.SIGKILL)
            _set_up(rank, ranks, port, folder)
            return
        pids[os.pidfd_open(pid)] = pid
    codes: dict[int, int | None] = dict.fromkeys(pids.values())
    waiting = dict(pids)
    while waiting:
        ready, _, _ = select.select([call, *waiting], [], [])
        for fd in [fd for fd in ready if fd in waiting]:
            pid = waiting.pop(fd)
            codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if call in ready or any(codes.values()):
            break  # nobody waits any more, or one has failed: those that are left are killed
    call.sendall(json.dumps(list(codes.values())).encode() + b"\n")
    os._exit(0)


def _set_up(rank: int, ranks: int, port: int, folder: Path) -> None:
    """Environment and output of one rank."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for stream, name in ((1, "out"), (2, "err")):
        file = folder / f"{rank}.{name}"
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)


if __name__ == "__main__":
    main(int(sys.argv[1]))
