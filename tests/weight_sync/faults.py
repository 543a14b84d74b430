"""What goes wrong inside a learner rank or a server rank of `forked`, for one sync.

Each fault wraps one function of megarl in that process and is undone afterwards.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from megarl.weight_sync import packing
from megarl.weight_sync.acks import Ack
from megarl.weight_sync.inflow import MessageInflow
from megarl.weight_sync.receiver import Receiver
from megarl.weight_sync.sender import Sender
from megarl.weight_sync.transport.p2p import Transfer

FOR_EVER_S = 600.0  # longer than any test

MESSAGE_KINDS = (
    "drop", "double", "change", "short", "long", "swap", "reorder", "mistag", "late", "hang",
    "kill", "stop",
)  # fmt: skip
"""With one of a rank's messages: left out; posted twice; a bit changed; half or twice as long; two
exchange their bytes, or their places; under another's number; after `for_s`; never; the process is
killed, or stopped."""

SENDER_KINDS = ("nan", "raise", "kill early", "stop early")
"""In a learner rank while it stages: weights that are no numbers; an error; the process ends."""

RECEIVER_KINDS = ("flip", "token", "mute", "slow", "kill early", "stop early", "kill late")
"""In a server rank: a bit of a live weight changed; an acknowledgement with another token, or none;
`for_s` before it begins; the process ends before it begins, or before it acknowledges."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`kind` says what, `at` with which of the rank's messages or weights, counted around."""

    kind: str
    at: int = 0
    for_s: float = 0.0


def end_self(kind: str) -> None:
    """Kill or stop this process."""
    how = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind.split()[0]]
    os.kill(os.getpid(), how)


def faulty(transfers: list[Transfer], fault: Fault) -> list[Transfer]:
    """The transfers of one sync, with a fault in one of them."""
    if not transfers:
        return transfers
    at = fault.at % len(transfers)
    mine = transfers[at]
    other = (at + 1) % len(transfers)
    if fault.kind == "drop":
        return transfers[:at] + transfers[at + 1 :]
    if fault.kind == "double":
        return [*transfers[: at + 1], mine, *transfers[at + 1 :]]
    if fault.kind == "reorder":
        changed = {at: transfers[other], other: mine}
    elif fault.kind == "swap":
        changed = {
            at: replace(mine, buffer=transfers[other].buffer),
            other: replace(transfers[other], buffer=mine.buffer),
        }
    elif fault.kind == "mistag":
        changed = {at: replace(mine, tag=mine.tag + 1000)}
    else:
        changed = {at: replace(mine, buffer=_faulty_buffer(mine.buffer, fault))}
    return [changed.get(i, transfer) for i, transfer in enumerate(transfers)]


def _faulty_buffer(whole: Callable[[], torch.Tensor], fault: Fault) -> Callable[[], torch.Tensor]:
    def buffer() -> torch.Tensor:
        if fault.kind in ("kill", "stop"):
            end_self(fault.kind)
        if fault.kind in ("late", "hang"):
            time.sleep(fault.for_s if fault.kind == "late" else FOR_EVER_S)
        tensor = whole()
        if fault.kind == "change":
            tensor = tensor.clone()
            tensor.view(torch.int32)[-1] ^= 1
        elif fault.kind == "short":
            tensor = tensor[: tensor.numel() // 2].clone()
        elif fault.kind == "long":
            tensor = torch.cat([tensor, tensor])
        return tensor

    return buffer


@contextlib.contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.name` replaced by `make` of it."""
    kept = getattr(owner, name)
    setattr(owner, name, make(kept))
    try:
        yield
    finally:
        setattr(owner, name, kept)


def _with_fault(fault: Fault) -> Callable[[Any], Any]:
    return lambda kept: lambda *args: faulty(kept(*args), fault)


@contextlib.contextmanager
def in_learner_rank(fault: Fault | None, parameters: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """A fault of MESSAGE_KINDS or SENDER_KINDS, for one publish."""
    with contextlib.ExitStack() as stack:
        if fault is not None and fault.kind in MESSAGE_KINDS:
            stack.enter_context(patched(packing, "outgoing", _with_fault(fault)))
        elif fault is not None and fault.kind == "nan":
            tensor = list(parameters.values())[fault.at % len(parameters)].view(-1)
            tensor[fault.at % tensor.numel()] = (torch.nan, torch.inf)[fault.at % 2]
        elif fault is not None:

            def checksums(kept: Any, fault: Fault = fault) -> Any:
                def run(sender: Sender) -> Any:
                    if fault.kind == "raise":
                        raise MemoryError("no room")
                    end_self(fault.kind)
                    return kept(sender)

                return run

            stack.enter_context(patched(Sender, "checksums", checksums))
        yield


@contextlib.contextmanager
def in_server_rank(fault: Fault | None) -> Iterator[None]:
    """A fault of MESSAGE_KINDS or RECEIVER_KINDS, for one update."""
    with contextlib.ExitStack() as stack:
        if fault is not None and fault.kind in MESSAGE_KINDS:
            for name in ("incoming", "between"):
                stack.enter_context(patched(packing, name, _with_fault(fault)))
        elif fault is not None and fault.kind == "flip":
            stack.enter_context(patched(MessageInflow, "fill", lambda kept: _flipping(kept, fault)))
        elif fault is not None and fault.kind in ("token", "mute", "kill late"):
            wrap = lambda kept: _acknowledging(kept, fault.kind)  # noqa: E731
            stack.enter_context(patched(Receiver, "acknowledge", wrap))
        elif fault is not None and fault.kind == "slow":
            time.sleep(fault.for_s)
        elif fault is not None:
            end_self(fault.kind)
        yield


def _flipping(kept: Any, fault: Fault) -> Any:
    def fill(inflow: MessageInflow, parameters: Mapping[str, torch.Tensor], until: float) -> None:
        kept(inflow, parameters, until)
        tensor = list(parameters.values())[fault.at % len(parameters)].view(-1).view(torch.int32)
        tensor[fault.at % tensor.numel()] ^= 1

    return fill


def _acknowledging(kept: Any, kind: str) -> Any:
    def acknowledge(receiver: Receiver, message: Any, ack: Ack) -> None:
        if kind == "kill late":
            end_self(kind)
        elif kind == "token":
            kept(receiver, message, replace(ack, token="0" * 32))
        # "mute" says nothing

    return acknowledge
