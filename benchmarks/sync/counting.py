"""How many Python calls a sync makes: functions that it calls, Python's and C's, in all threads.

`load` is a weight loader for the server that counts what megarl's does; the server must be started
with it in --custom-weight-loader, and with COUNT_FILE in its environment.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from megarl.weight_sync import receiver
from megarl.weight_sync.connection import Connection

LOADER = f"{__name__}.load"
COUNT_FILE = "MEGARL_BENCHMARK_COUNT_FILE"


class Calls:
    """A number that grows while it is counted."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """What sys.setprofile wants."""
        if event in ("call", "c_call"):
            self.num_calls += 1


@contextmanager
def counted() -> Iterator[Calls]:
    """Count calls in this thread, and in those that are started inside."""
    calls = Calls()
    threading.setprofile(calls)
    sys.setprofile(calls)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


@contextmanager
def counted_requests() -> Iterator[list[str]]:
    """The routes of all HTTP requests that are sent inside."""
    routes: list[str] = []
    call = Connection.call

    def noted(to: Connection, method: str, route: str, *more: Any) -> tuple[int, str]:
        routes.append(route)
        return call(to, method, route, *more)

    Connection.call = noted  # type: ignore[method-assign,assignment]
    try:
        yield routes
    finally:
        Connection.call = call  # type: ignore[method-assign]


def load(model: torch.nn.Module, named: Sequence[tuple[str, object]]) -> None:
    """megarl's loader, counted."""
    with counted() as calls:
        receiver.load(model, named)
    with Path(os.environ[COUNT_FILE]).open("a", encoding="ascii") as file:
        file.write(f"{calls.num_calls}\n")
