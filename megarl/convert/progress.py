"""The line that says how far a long command is: bytes, bytes a second, seconds left."""

from __future__ import annotations

import sys
import time

from megarl.reshard.page import bytes_text

TOLD_EVERY_S = 0.5  # the line of progress on a terminal
LOGGED_EVERY_S = 10.0  # and elsewhere


class Progress:
    """The line of progress on stderr."""

    def __init__(self, total_bytes: int, done_bytes: int = 0) -> None:
        self._total, self._done, self._before = total_bytes, done_bytes, done_bytes
        self._begun = self._told = time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def add(self, num_bytes: int) -> None:
        """So many bytes more are done."""
        self._done += num_bytes
        now = time.monotonic()
        if now - self._told >= (TOLD_EVERY_S if self._is_terminal else LOGGED_EVERY_S):
            self._told = now
            self._tell()

    def end(self) -> None:
        """All is done."""
        if self._told > self._begun:
            self._tell()
            if self._is_terminal:
                sys.stderr.write("\n")

    def _tell(self) -> None:
        passed = max(time.monotonic() - self._begun, 1e-9)
        rate = (self._done - self._before) / passed
        left = (self._total - self._done) / rate if rate else float("inf")
        text = (
            f"{100 * self._done / max(1, self._total):5.1f} %  {bytes_text(self._done)} of "
            f"{bytes_text(self._total)}  {bytes_text(rate)}/s  {max(left, 0):.0f} s left"
        )
        begin, end = ("\r", "  ") if self._is_terminal else ("", "\n")
        sys.stderr.write(f"{begin}{text}{end}")
        sys.stderr.flush()
