"""Parcels to and from live parameters: packed where they must be, in place where they can be.

Owns the bytes of a message. A parcel of one box that lies whole in memory is sent from there, and
received there; others go through a buffer of their own, which is never reused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from megarl.reshard import execute
from megarl.weight_sync.parcels import Parcel
from megarl.weight_sync.transport.p2p import Transfer

Tensors = Mapping[str, torch.Tensor]


def outgoing(parcels: Iterable[Parcel], parameters: Tensors, dtype: torch.dtype) -> list[Transfer]:
    """The transfers that send `parcels` out of `parameters`, as `dtype`."""
    return [_outgoing(parcel, parameters, dtype) for parcel in parcels]


def incoming(parcels: Iterable[Parcel], parameters: Tensors, dtype: torch.dtype) -> list[Transfer]:
    """The transfers that receive `parcels` into `parameters`, which are of `dtype`."""
    return [_incoming(parcel, parameters, dtype) for parcel in parcels]


def between(
    me: str, parcels: Iterable[Parcel], parameters: Tensors, dtype: torch.dtype
) -> list[Transfer]:
    """The transfers of `parcels` that member `me` takes or gives, in their order."""
    return [
        (_incoming if parcel.taker == me else _outgoing)(parcel, parameters, dtype)
        for parcel in parcels
    ]


def _outgoing(parcel: Parcel, parameters: Tensors, dtype: torch.dtype) -> Transfer:
    def buffer() -> torch.Tensor:
        views: list[torch.Tensor] = [
            execute.read(move, parameters).detach() for move in parcel.moves
        ]
        if len(views) == 1 and views[0].dtype == dtype and views[0].is_contiguous():
            return views[0].view(-1)
        packed = torch.empty(parcel.num_elements, dtype=dtype, device=views[0].device)
        for view, part in _parts(views, packed):
            part.copy_(view)
        return packed

    return Transfer(parcel.taker, False, parcel.number, buffer, lambda _: None)


def _incoming(parcel: Parcel, parameters: Tensors, dtype: torch.dtype) -> Transfer:
    views = [execute.written(move, parameters) for move in parcel.moves]
    is_direct = len(views) == 1 and views[0].is_contiguous()

    def buffer() -> torch.Tensor:
        if is_direct:
            direct: torch.Tensor = views[0].view(-1)
            return direct
        return torch.empty(parcel.num_elements, dtype=dtype, device=views[0].device)

    def done(packed: torch.Tensor) -> None:
        if not is_direct:
            for view, part in _parts(views, packed):
                view.copy_(part)

    return Transfer(parcel.giver, True, parcel.number, buffer, done)


def _parts(
    views: list[torch.Tensor], packed: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each view with its part of the packed buffer, in its shape."""
    at = 0
    for view in views:
        yield view, packed[at : at + view.numel()].view(view.shape)
        at += view.numel()
