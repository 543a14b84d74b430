"""One thing that keeps a configuration from running."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """What cannot run, in words, and the settings it is about."""

    text: str
    settings: tuple[str, ...] = ()
