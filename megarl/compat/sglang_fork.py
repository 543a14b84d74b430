"""SGLang's processes on a CPU, forked from the one that has imported it.

Owns the start method of a CPU server's schedulers and detokenizer. SGLang spawns them, so that each
imports torch and sglang anew: of a small server's start that is the longest part, and where
processes share a few cores they do it one after the other. A fork is safe while a process has one
thread, which is looked at; with more, or where SGLang binds ranks to NUMA nodes (which it does by
the executable that it spawns), it spawns as it would by itself. A GPU server always spawns: a CUDA
context does not survive a fork.

For: sglang 0.5.23 (https://github.com/sgl-project/sglang), _set_envs_and_config in
srt/entrypoints/engine.py. Ends when it takes the start method from its configuration.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

from megarl.compat.after_import import after_import
from megarl.linux import libc, set_death_signal

MODULE = "sglang.srt.entrypoints.engine"


def install() -> None:
    """Have SGLang fork, where that is safe, once it is imported. For CPU servers only."""
    after_import(MODULE, _wrap)


def num_threads() -> int:
    """Threads of this process, those that no Python code has started among them."""
    return len(os.listdir("/proc/self/task"))


def _wrap(module: Any) -> None:
    set_up = module._set_envs_and_config

    @functools.wraps(set_up)
    def set_up_and_fork(server_args: Any) -> None:
        set_up(server_args)
        if num_threads() == 1 and not server_args.numa_node:
            multiprocessing.set_start_method("fork", force=True)
            libc()  # not loaded between fork and the child's first line
            os.register_at_fork(after_in_child=_tie_to(os.getpid()))

    module._set_envs_and_config = set_up_and_fork


def _tie_to(server: int) -> Callable[[], None]:
    """What a child does first: spawn what it starts itself, and end when the server ends.

    SGLang asks the kernel for that end only later, and where the server has ended by then, never.
    """
    forking = [server]

    def in_child() -> None:
        multiprocessing.set_start_method("spawn", force=True)
        parent, forking[0] = forking[0], os.getpid()
        if parent == server:
            set_death_signal(signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)

    return in_child
