"""The reference: the policy as the run began, frozen, for the KL term. Parked in host memory.

Owns the copy and its exchange with the policy's weights. It has the policy's own layout, so TP, PP
and DP need nothing of their own here. Knows nothing of log-probs, losses or checkpoints: it is made
before the policy of a resumed run is restored, so from `actor.model` as at the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class Reference:
    """A copy of `weights` (this rank's live parameters by name) as they are now."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = dict(weights)
        self._parked = {name: _park(weight) for name, weight in self._weights.items()}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """While it lasts, the live parameters hold the reference; the policy is parked instead.

        The two are exchanged in place, one tensor at a time, and back again bit for bit, so no more
        than one copy of the weights is parked and one tensor is extra on the device. No optimizer
        step, save or publish may happen inside. Not to be nested.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @property
    def num_bytes(self) -> int:
        """Host memory that it takes on this rank."""
        return sum(weight.nbytes for weight in self._parked.values())

    def _exchange(self) -> None:
        with torch.no_grad():
            for name, live in self._weights.items():
                parked = self._parked[name]
                incoming = parked.to(live.device, copy=True)
                parked.copy_(live)
                live.copy_(incoming)


def _park(weight: Tensor) -> Tensor:
    """A copy in host memory; page-locked where it comes from a device."""
    copy = weight.detach().to("cpu", copy=True)
    return copy.pin_memory() if weight.is_cuda else copy
