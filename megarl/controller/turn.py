"""Whose turn it is on the devices: what the loop asks for, stage by stage, in every run.

Owns the interface, and the turn of a run whose two sides have devices of their own: nothing has to
move. Where they share devices it is `colocated.py`'s.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

StageName = Literal["starting", "generating", "learning", "syncing", "saving"]
Figures = dict[str, float | int | str]


class Turn:
    """Whose turn it is on the devices. This one is of a disaggregated run: both sides keep all."""

    async def to(self, stage: StageName) -> Figures:
        """Go to `stage`; returns the `memory/*` figures of the one that ends and of the change."""
        return {}

    @asynccontextmanager
    async def visit(self, stage: StageName) -> AsyncIterator[None]:
        """Be in `stage` inside, and where one was before after it."""
        yield

    @asynccontextmanager
    async def rejoining(self) -> AsyncIterator[bool]:
        """Whether a server that has started anew can be synced now; inside, weights are there.

        Where it cannot, the next sync of all servers will.
        """
        yield True
