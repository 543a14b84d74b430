"""Run by tests: `family.py PIDS [SHM]` is a parent, a child in its own session that ignores
SIGTERM, and a grandchild that lost its parent. Each appends its pid to PIDS, then sleeps. The
grandchild, the hardest one to find, makes SHM and maps it.
"""

import mmap
import os
import signal
import sys
import time


def sign() -> None:
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.getpid()}\n")


def grandchild() -> None:
    os.setsid()
    for path in sys.argv[2:]:
        with open(path, "w+b") as file:
            file.truncate(mmap.PAGESIZE)
            mapping = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        assert len(mapping) == mmap.PAGESIZE
    sign()
    time.sleep(60)


def child() -> None:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        if os.fork() == 0:
            grandchild()
        os._exit(0)  # between the two: its child is an orphan now
    sign()
    time.sleep(60)


if __name__ == "__main__":
    if os.fork() == 0:
        child()
        os._exit(0)
    sign()
    time.sleep(60)
