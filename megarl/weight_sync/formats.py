"""In which number format each parameter travels, and in which a server keeps it.

Owns the translation of precisions into torch's types. A parameter travels in the policy's format,
in float32 where it is float32 whatever the policy is (the router's expert bias, scales of blocks),
or as float8. A server may
keep what travels in the policy's format in float32 (GLM-4.5's router): it is widened on arrival,
which loses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megarl.actor.parameters import Precision
from megarl.errors import WeightSyncError
from megarl.reshard.arena import Slot
from megarl.reshard.layout import Layout
from megarl.weight_sync.control import WIRE_DTYPES
from megarl.weight_sync.transport.arenas import AnyArena, AnyReader

FIXED_DTYPES: Mapping[Precision, torch.dtype] = {
    "float32": torch.float32,
    "float8": torch.float8_e4m3fn,
}
"""Types of parameters whose precision is not the policy's."""


@dataclass(frozen=True)
class WireFormat:
    """The types on the wire: `policy` of all parameters but those that are named in `fixed`."""

    policy: torch.dtype
    fixed: Mapping[str, torch.dtype]

    def of(self, tensor: str) -> torch.dtype:
        """The type of a parameter."""
        return self.fixed.get(tensor, self.policy)

    def of_precision(self, precision: Precision) -> torch.dtype:
        """The type of parameters of one precision."""
        return FIXED_DTYPES.get(precision, self.policy)


def policy_dtype(name: str) -> torch.dtype:
    """The policy's type on the wire. Raises WeightSyncError for a name that is none."""
    if name not in WIRE_DTYPES:
        raise WeightSyncError(f"wire dtype {name!r} is unknown; use one of {list(WIRE_DTYPES)}")
    return WIRE_DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as SGLang's requests and a config.json spell it.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def wire_format(name: str, layout: Layout) -> WireFormat:
    """The types of all parameters of `layout`, whose policy has the format `name`.

    Raises WeightSyncError for an unknown name.
    """
    fixed = {
        parameter.name: FIXED_DTYPES[parameter.precision]
        for parameter in layout.parameters
        if parameter.precision in FIXED_DTYPES
    }
    return WireFormat(policy_dtype(name), fixed)


def staged(arena: AnyArena | AnyReader, slot: Slot, wire: WireFormat) -> torch.Tensor:
    """The tensor in a slot of an arena, without a copy."""
    dtype = wire.of_precision(slot.precision)
    num_bytes = math.prod(slot.shape) * dtype.itemsize
    return arena.view(slot.offset, num_bytes).view(dtype).view(slot.shape)
