"""Frozen models beside the policy, such as the reference of the KL term. Parked in host memory.

Owns the numbers of a frozen model and how they take the place of the policy on the device for a
while. It has the layout of the policy, so TP, PP and DP need nothing of their own here. Knows
nothing of log-probs or checkpoints: it is made before the policy of a resumed run is restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from megarl.float8 import BlockScaling, dequantize, quantize, relative_error

Storage = Literal["policy", "fp8"]

BLOCKS = BlockScaling()
PRECISE = ("embedding", "output_layer", "router", "norm")  # in names of what is never quantized


class FrozenModel:
    """A model of the policy's shape. `weights` are this rank's live parameters by name."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        storage: Storage = "policy",
        load: Callable[[], None] | None = None,
    ) -> None:
        """Freeze `weights` as they are now, or what `load()` writes into them in their place.

        In the latter case they are the policy's again, bit for bit, also where `load` raises.
        """
        self._weights = dict(weights)
        self._quantized: dict[str, tuple[Tensor, Tensor]] = {}
        self.quantization_error = 0.0
        """Largest relative error (L2) of a tensor that is parked in float8."""
        self._parked = {name: _park(weight) for name, weight in self._weights.items()}
        if load is not None:
            try:
                load()
            finally:
                self._exchange()
        if storage == "fp8":
            self._quantize()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """While it lasts, the live parameters hold the frozen model; the policy is parked instead.

        The two are exchanged in place, one tensor at a time, and back again bit for bit, so that
        one tensor is extra on the device, and in host memory the policy's copy where the frozen one
        is float8. No optimizer step, save or publish may happen inside. Not to be nested, with
        another frozen model of the same weights neither.
        """
        policy = {name: _park(self._weights[name]) for name in self._quantized}
        self._exchange()
        try:
            with torch.no_grad():
                for name, (float8, scales) in self._quantized.items():
                    live = self._weights[name]
                    whole = dequantize(
                        float8.to(live.device), scales.to(live.device), BLOCKS, live.dtype
                    )
                    live.copy_(whole)
            yield
        finally:
            self._exchange()
            with torch.no_grad():
                for name, parked in policy.items():
                    self._weights[name].copy_(parked)

    @property
    def num_bytes(self) -> int:
        """Host memory that it takes on this rank between uses."""
        pairs = [tensor for pair in self._quantized.values() for tensor in pair]
        return sum(tensor.nbytes for tensor in (*self._parked.values(), *pairs))

    def _quantize(self) -> None:
        """Matrices of linears become float8 in blocks, by the rule that servers' weights have."""
        for name in list(self._parked):
            parked = self._parked[name]
            if parked.dim() < 2 or any(word in name for word in PRECISE):
                continue
            error = relative_error(parked, BLOCKS)
            self.quantization_error = max(self.quantization_error, error)
            self._quantized[name] = quantize(parked, BLOCKS)
            del self._parked[name]

    def _exchange(self) -> None:
        with torch.no_grad():
            for name, parked in self._parked.items():
                live = self._weights[name]
                incoming = parked.to(live.device, copy=True)
                parked.copy_(live)
                live.copy_(incoming)


def _park(weight: Tensor) -> Tensor:
    """A copy in host memory; page-locked where it comes from a device."""
    copy = weight.detach().to("cpu", copy=True)
    return copy.pin_memory() if weight.is_cuda else copy
