"""In which number format each parameter travels, and in which a server keeps it.

Owns the translation of precisions into torch's types. A parameter travels in the policy's format,
or in float32 where it is float32 whatever the policy is (the router's expert bias). A server may
keep what travels in the policy's format in float32 (GLM-4.5's router): it is widened on arrival,
which loses nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megarl.actor.parameters import Precision
from megarl.errors import WeightSyncError
from megarl.reshard.arena import Slot
from megarl.reshard.layout import Layout
from megarl.weight_sync.control import WIRE_DTYPES
from megarl.weight_sync.transport.arenas import AnyArena, AnyReader


@dataclass(frozen=True)
class WireFormat:
    """The types on the wire: `policy` of most parameters, float32 of those named in `float32`."""

    policy: torch.dtype
    float32: frozenset[str]

    def of(self, tensor: str) -> torch.dtype:
        """The type of a parameter."""
        return torch.float32 if tensor in self.float32 else self.policy

    def of_precision(self, precision: Precision) -> torch.dtype:
        """The type of parameters of one precision."""
        return torch.float32 if precision == "float32" else self.policy


def policy_dtype(name: str) -> torch.dtype:
    """The policy's type on the wire. Raises WeightSyncError for a name that is none."""
    if name not in WIRE_DTYPES:
        raise WeightSyncError(f"wire dtype {name!r} is unknown; use one of {list(WIRE_DTYPES)}")
    return WIRE_DTYPES[name]


def wire_format(name: str, layout: Layout) -> WireFormat:
    """The types of all parameters of `layout`, whose policy has the format `name`.

    Raises WeightSyncError for an unknown name, and for parameters of precisions that no sync
    carries.
    """
    precisions = {parameter.name: parameter.precision for parameter in layout.parameters}
    other = [tensor for tensor, p in precisions.items() if p not in ("policy", "float32")]
    if other:
        raise WeightSyncError(
            f"{other[0]} is {precisions[other[0]]}, which a weight sync does not carry; use "
            "servers in the policy's precision"
        )
    float32 = frozenset(tensor for tensor, p in precisions.items() if p == "float32")
    return WireFormat(policy_dtype(name), float32)


def staged(arena: AnyArena | AnyReader, slot: Slot, wire: WireFormat) -> torch.Tensor:
    """The tensor in a slot of an arena, without a copy."""
    dtype = wire.of_precision(slot.precision)
    num_bytes = math.prod(slot.shape) * dtype.itemsize
    return arena.view(slot.offset, num_bytes).view(dtype).view(slot.shape)
