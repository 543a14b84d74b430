"""`python -m megarl.launch.warden [options] -- COMMAND`: runs one command on a node and leaves
nothing of it.

Stands between the launcher and each engine process, on this machine and on the far side of srun
alike. Gives COMMAND a temp folder of its own. Ends the whole tree of COMMAND, and removes what it
left there and in /dev/shm, when COMMAND ends, when standard input closes (the launcher asks, or was
killed), or at SIGTERM or SIGINT (Slurm ends the job). Ends with COMMAND's status, or 128 + n for
signal n. Knows nothing of what COMMAND is.
"""

from __future__ import annotations

import argparse
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import MutableMapping

from megarl.launch.cleanup import (
    SharedFile,
    is_run_file,
    present,
    run_prefix,
    sweep,
    sweep_run,
    used_by,
)
from megarl.launch.process import (
    SHELL_SIGNAL_BASE,
    descendants,
    dying_with_parent,
    kill_below,
)
from megarl.launch.tempdir import make_temp_folder
from megarl.linux import adopt_orphans
from megarl.nodes import RUN_ID_VARIABLE

LOOK_EVERY_S = 2.0  # what processes that die by themselves had in /dev/shm is as old as this
NODE_RANK = "{node_rank}"


def main() -> None:
    """Run the command line's COMMAND to its end."""
    parser = argparse.ArgumentParser(prog="megarl.launch.warden")
    parser.add_argument("--grace-s", type=float, default=0.0, help="between SIGTERM and SIGKILL")
    parser.add_argument("--gpus", default="", help="START:END of the visible ones, or none")
    parser.add_argument("--sweep-run", action="append", default=[], help="run ids")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    select_gpus(options.gpus, os.environ)
    argv = [fill_node_rank(word, os.environ.get("SLURM_NODEID", "0")) for word in options.command]
    try:
        folder = make_temp_folder(run_prefix(os.environ.get(RUN_ID_VARIABLE, "")), os.environ)
    except OSError as error:
        print(f"no temp folder can be made: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(126)
    try:
        status = watch(argv, options.grace_s, options.sweep_run)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(status)


def select_gpus(wanted: str, environ: MutableMapping[str, str]) -> None:
    """Narrow CUDA_VISIBLE_DEVICES to positions START:END of what is visible; "none" hides all.

    >>> environ = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    >>> select_gpus("2:4", environ); environ
    {'CUDA_VISIBLE_DEVICES': '6,7'}
    >>> environ = {}
    >>> select_gpus("1:2", environ); environ
    {'CUDA_VISIBLE_DEVICES': '1'}
    """
    if wanted == "none":
        environ["CUDA_VISIBLE_DEVICES"] = ""
    elif wanted:
        start, _, end = wanted.partition(":")
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(i) for i in range(int(end))]
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[int(start) : int(end)])


def fill_node_rank(word: str, node_rank: str) -> str:
    """A step has one command line for all its nodes; this is where they differ."""
    return node_rank if word == NODE_RANK else word


def watch(argv: list[str], grace_s: float, run_ids: list[str]) -> int:
    """Start `argv`, wait for its end or for ours, clean up; returns the status to end with."""
    adopt_orphans()
    before = present()
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(signum, lambda *_: None)
    try:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=dying_with_parent(signal.SIGKILL),
        )
    except OSError as error:
        print(f"{argv[0]} cannot be started: {error.strerror}", file=sys.stderr)  # noqa: T201
        return 127 if isinstance(error, FileNotFoundError) else 126  # as shells do
    used: set[SharedFile] = set()
    try:
        _wait_for_an_end(child, wake, used)
    finally:
        _look(used)
        kill_below(os.getpid(), grace_s)
        sweep(file for file in used - before if not is_run_file(file))
        for run_id in run_ids:
            sweep_run(run_id)
    status = child.wait()
    return SHELL_SIGNAL_BASE - status if status < 0 else status


def _wait_for_an_end(child: subprocess.Popen[bytes], wake: int, used: set[SharedFile]) -> None:
    """Return when the child has ended, a signal asks us to end, or standard input has closed."""
    while True:
        readable, _, _ = select.select([sys.stdin.fileno(), wake], [], [], LOOK_EVERY_S)
        if child.poll() is not None:
            return
        if wake in readable and set(os.read(wake, 1024)) - {signal.SIGCHLD}:
            return
        if sys.stdin.fileno() in readable and not os.read(sys.stdin.fileno(), 1024):
            return
        if not readable:
            _look(used)


def _look(used: set[SharedFile]) -> None:
    used |= used_by(proc.pid for proc in descendants(os.getpid()))


if __name__ == "__main__":
    main()
