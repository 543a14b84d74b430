"""Parcels to and from live parameters: packed where they must be, in place where they can be.

Owns the bytes of a message. A parcel of one box that lies whole in memory is sent from there, and
received there; others go through a buffer of their own, which is never reused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from megarl.reshard import execute
from megarl.weight_sync.formats import WireFormat
from megarl.weight_sync.parcels import Parcel
from megarl.weight_sync.transport.p2p import Transfer

Tensors = Mapping[str, torch.Tensor]


def outgoing(parcels: Iterable[Parcel], parameters: Tensors, wire: WireFormat) -> list[Transfer]:
    """The transfers that send `parcels` out of `parameters`, each box as it travels."""
    return [_outgoing(parcel, parameters, wire) for parcel in parcels]


def incoming(parcels: Iterable[Parcel], parameters: Tensors, wire: WireFormat) -> list[Transfer]:
    """The transfers that receive `parcels` into `parameters`, which may be wider than the wire."""
    return [_incoming(parcel, parameters, wire) for parcel in parcels]


def between(
    me: str, parcels: Iterable[Parcel], parameters: Tensors, wire: WireFormat
) -> list[Transfer]:
    """The transfers of `parcels` that member `me` takes or gives, in their order."""
    return [
        (_incoming if parcel.taker == me else _outgoing)(parcel, parameters, wire)
        for parcel in parcels
    ]


def _outgoing(parcel: Parcel, parameters: Tensors, wire: WireFormat) -> Transfer:
    def buffer() -> torch.Tensor:
        views: list[torch.Tensor] = [
            execute.read(move, parameters).detach() for move in parcel.moves
        ]
        if _is_direct(parcel, views, wire):
            return views[0].view(-1).view(torch.uint8)
        packed = torch.empty(parcel.num_bytes, dtype=torch.uint8, device=views[0].device)
        for view, part in _parts(parcel, views, packed, wire):
            part.copy_(view)
        return packed

    return Transfer(parcel.taker, False, parcel.number, buffer, lambda _: None)


def _incoming(parcel: Parcel, parameters: Tensors, wire: WireFormat) -> Transfer:
    views: list[torch.Tensor] = [execute.written(move, parameters) for move in parcel.moves]
    direct = _is_direct(parcel, views, wire)

    def buffer() -> torch.Tensor:
        if direct:
            return views[0].view(-1).view(torch.uint8)
        return torch.empty(parcel.num_bytes, dtype=torch.uint8, device=views[0].device)

    def done(packed: torch.Tensor) -> None:
        if not direct:
            for view, part in _parts(parcel, views, packed, wire):
                view.copy_(part)

    return Transfer(parcel.giver, True, parcel.number, buffer, done)


def _is_direct(parcel: Parcel, views: list[torch.Tensor], wire: WireFormat) -> bool:
    """Whether the message is, byte for byte, what lies in memory."""
    dtype = wire.of(parcel.moves[0].tensor)
    return len(views) == 1 and views[0].dtype == dtype and views[0].is_contiguous()


def _parts(
    parcel: Parcel, views: list[torch.Tensor], packed: torch.Tensor, wire: WireFormat
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each view with its part of the packed bytes, in its shape and as it travels."""
    at = 0
    for move, view in zip(parcel.moves, views, strict=True):
        dtype = wire.of(move.tensor)
        num_bytes = view.numel() * dtype.itemsize
        yield view, packed[at : at + num_bytes].view(dtype).view(view.shape)
        at += num_bytes
