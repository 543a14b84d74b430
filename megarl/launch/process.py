"""Processes on this node: started in sessions of their own, watched, and ended with all they
started.

Owns the start, the exit watch and the kill of a process tree, read from Linux's /proc. Knows
nothing of roles, Slurm or shared memory. A return code below 0 is the signal that ended a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.errors import LaunchError
from megarl.linux import libc, process_fields, process_ids, set_death_signal

SHELL_SIGNAL_BASE = 128  # shells, srun and our warden report signal n as exit status 128 + n
FORCE_AFTER_S = 5.0  # a warden ends its tree in well under a second
KILL_ROUNDS_S = 5.0  # SIGKILL takes milliseconds; longer only in uninterruptible I/O


@dataclass(frozen=True, slots=True)
class Proc:
    """One process. The kernel reuses pids; `started_ticks` (after boot) tells two apart."""

    pid: int
    parent: int
    started_ticks: int
    has_ended: bool


def processes() -> dict[int, Proc]:
    """Every process of this node by pid, with those that have ended but were not waited for yet."""
    return {pid: proc for pid in process_ids() if (proc := _read(pid)) is not None}


def read_process(pid: int) -> Proc | None:
    """The process `pid`, or None where it has ended."""
    proc = _read(pid)
    return None if proc is None or proc.has_ended else proc


def _read(pid: int) -> Proc | None:
    fields = process_fields(pid)
    if fields is None:
        return None
    # A zombie whose other threads are still being ended holds memory, and its children are its own.
    has_ended = fields[0] in "ZX" and int(fields[17]) <= 1
    return Proc(pid, int(fields[1]), int(fields[19]), has_ended)


def descendants(pid: int) -> list[Proc]:
    """All living processes below `pid`, in whatever group or session, parents first."""
    children: dict[int, list[Proc]] = {}
    for proc in processes().values():
        children.setdefault(proc.parent, []).append(proc)
    found: list[Proc] = []
    queue = [pid]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += [proc.pid for proc in below]
    return [proc for proc in found if not proc.has_ended]


def signal_all(procs: Iterable[Proc], signum: int) -> None:
    """Send `signum` to each that is still the process it was."""
    for proc in procs:
        now = read_process(proc.pid)
        if now is not None and now.started_ticks == proc.started_ticks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(proc.pid, signum)


def kill_below(pid: int, grace_s: float) -> None:
    """End everything below `pid`: SIGTERM and up to `grace_s` seconds, then SIGKILL. Blocks.

    What is started meanwhile is found in the next round; the caller should be a subreaper
    (`linux.adopt_orphans`), so that no process leaves its tree by losing its parent.
    """
    if grace_s > 0:
        signal_all(descendants(pid), signal.SIGTERM)
        _wait_gone(pid, grace_s)
    deadline = time.monotonic() + KILL_ROUNDS_S
    while (left := descendants(pid)) and time.monotonic() < deadline:
        signal_all(left, signal.SIGKILL)
        _wait_gone(pid, 0.2)


def _wait_gone(pid: int, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while descendants(pid) and time.monotonic() < deadline:
        time.sleep(0.02)


def dying_with_parent(signum: int) -> Callable[[], None]:
    """What a child runs before exec, so that the kernel sends it `signum` when this process ends.

    It holds for the child itself, not for its children, and follows the thread that started it:
    start processes from the main thread.
    """
    libc()  # not loaded between fork and exec
    parent = os.getpid()

    def before_exec() -> None:
        set_death_signal(signum)
        if os.getppid() != parent:  # it ended before the kernel was told
            os._exit(SHELL_SIGNAL_BASE + signum)

    return before_exec


def as_signal(status: int) -> int:
    """An exit status with 128 + n, as shells and srun spell signal n, as -n.

    >>> as_signal(137), as_signal(-9), as_signal(3)
    (-9, -9, 3)
    """
    if SHELL_SIGNAL_BASE < status <= SHELL_SIGNAL_BASE + signal.NSIG:
        return SHELL_SIGNAL_BASE - status
    return status


def describe_status(returncode: int) -> str:
    """How a process ended, for an error.

    >>> describe_status(-9), describe_status(2)
    ('killed by SIGKILL', 'ended with status 2')
    """
    if returncode >= 0:
        return f"ended with status {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


class Process:
    """A running child, whose standard input is a pipe that we hold: its end asks the child to end.

    Made by `start`. Ending the pipe needs no signal, crosses srun, and happens by itself when this
    process is killed.
    """

    def __init__(
        self,
        name: str,
        log_path: Path,
        child: asyncio.subprocess.Process,
        force: Callable[[Process], None],
    ) -> None:
        self.name = name
        self.log_path = log_path
        self._child = child
        self._force = force

    @property
    def pid(self) -> int:
        """Its process id on this machine."""
        return self._child.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; below 0 the signal that ended it."""
        status = self._child.returncode
        return None if status is None else as_signal(status)

    async def wait(self) -> int:
        """Wait for its end, as long as it takes; returns its return code. Any number may wait."""
        return as_signal(await self._child.wait())

    def ask_to_end(self) -> None:
        """Close its standard input. It may take a while to end; `wait` tells."""
        assert self._child.stdin is not None
        self._child.stdin.close()

    def kill(self) -> None:
        """End it: by asking, and by force where it still runs FORCE_AFTER_S later."""
        if self.returncode is None:
            self.ask_to_end()
            asyncio.get_running_loop().call_later(FORCE_AFTER_S, self.force)

    def force(self) -> None:
        """End it and everything below it by force, now; nothing where it has ended."""
        if self.returncode is None:
            self._force(self)

    def signal(self, signum: int) -> None:
        """Send it a signal; nothing where it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._child.send_signal(signum)


def kill_tree(process: Process) -> None:
    """SIGKILL it and everything below it on this node, now."""
    below = descendants(process.pid)
    process.signal(signal.SIGKILL)
    signal_all(below, signal.SIGKILL)


async def start(
    name: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    log_path: Path,
    death_signal: int | None = None,
    force: Callable[[Process], None] = kill_tree,
) -> Process:
    """Start `argv` in a session of its own, its output appended to `log_path`.

    `death_signal` is sent to it by the kernel when this process ends (None: nothing is sent);
    `force` is how it is ended by force. Raises LaunchError where it cannot be started.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        try:
            child = await asyncio.create_subprocess_exec(
                *argv,
                env=dict(env),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=None if death_signal is None else dying_with_parent(death_signal),
            )
        except OSError as error:
            raise LaunchError(
                f"{name}: {argv[0]} cannot be started: {error.strerror}; "
                "check launch.learner_python and launch.rollout_python"
            ) from error
    return Process(name, log_path, child, force)
