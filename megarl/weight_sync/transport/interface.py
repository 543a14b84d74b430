"""What a receiver asks of a way by which weights come in. Owns nothing but that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from megarl.weight_sync.control import ControlMessage
    from megarl.weight_sync.route import Route


class Inflow(Protocol):
    """One way into a server rank's live parameters, kept between syncs.

    All of it raises WeightSyncError where it cannot go on, none of it waits past `until` (a time of
    `time.monotonic`).
    """

    def open(
        self, message: ControlMessage, route: Route, device: torch.device, until: float
    ) -> None:
        """Find all that is needed for this sync, before the first byte is written on `device`."""

    def fill(self, parameters: Mapping[str, torch.Tensor], until: float) -> None:
        """Write this way's boxes into the live parameters."""

    def check(self, message: ControlMessage) -> None:
        """See that what was read was of this sync from beginning to end."""

    def refuse(self, message: ControlMessage, why: str) -> None:
        """Tell the others that this rank does not go on, and drop what the sync has opened."""

    def let_go(self) -> None:
        """Close what must not be open between syncs, whether the sync went well or not."""

    @property
    def moved_bytes(self) -> Mapping[str, int]:
        """Bytes that the last `fill` wrote, by link."""
