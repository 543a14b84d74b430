"""A whole sync of a dense policy from a learner's process into a server's, by megarl's own code."""

from __future__ import annotations

from dataclasses import replace

import torch

from megarl.weight_sync.acks import Ack
from megarl.weight_sync.batches import SINGLE_BYTES, Copy, Prepared, View
from tests.gpu.machine import Machine, Outcome, Peer
from tests.gpu.sides import Learner, Server

REPEATS = 5


def run(machine: Machine) -> Outcome:
    outcome = Outcome()
    learner = Peer(machine, Learner)
    learner.ask("load", 1)
    wanted, _ = learner.ask("sums")
    _, sum_s = learner.ask("sums")
    outcome.figures["learner_check_s"] = round(sum_s, 5)
    server = Server(machine, 1)
    num_bytes = server.num_bytes
    outcome.figures["gigabytes"] = round(num_bytes / 1e9, 3)
    copy_s = machine.copy_seconds(num_bytes)
    outcome.figures["device_copy_s"] = round(copy_s, 5)
    for way in ("direct", "staged"):
        server.forget()
        first, ack = _sync(learner, server, way == "direct")
        wrong = server.differences(ack, wanted)
        assert not wrong, f"{way}: {wrong[:3]}"
        figures = {f"{way}_first_s": first.copy_s, f"{way}_check_s": ack.check_s}
        outcome.figures.update({name: round(value, 5) for name, value in figures.items()})
        bound = float("inf") if machine.dry else 1.25
        outcome.want(f"{way}_copy_of_device_copy", ack.copy_s / copy_s, high=bound)
        if not machine.dry:
            read = num_bytes / ack.check_s / (2 * num_bytes / copy_s)
            outcome.want(f"{way}_check_of_copy", read, low=0.5)
    _compare_calls(machine, outcome)
    outcome.want("copies_of_a_layer", server.num_copies_of_layer(1), high=10)
    outcome.figures["stage_s"] = round(learner.ask("stage_seconds", 1, 99), 5)
    del server
    _slices(machine, learner, outcome)
    learner.close()
    return outcome


def _slices(machine: Machine, learner: Peer, outcome: Outcome) -> None:
    """Rank 0 of a server of TP 2: columns of the row-parallel weights are strided."""
    half = Server(machine, 2)
    _, ack = _sync(learner, half, True, tp=2)
    assert ack.ok, ack.error
    copy_s = machine.copy_seconds(half.num_bytes)
    outcome.figures["half_copy_of_device_copy"] = round(ack.copy_s / copy_s, 4)
    outcome.figures["half_check_of_copy"] = round(copy_s / 2 / ack.check_s, 4)
    outcome.figures["half_copies_of_a_layer"] = half.num_copies_of_layer(1)


def _compare_calls(machine: Machine, outcome: Outcome) -> None:
    """The same copies all as single calls and all together: is SINGLE_BYTES well chosen?"""
    device = machine.device
    rows = 4 if machine.dry else 1 << 20
    sizes = {"small": (64, 64), "large": (rows, 64)}  # of 8 KiB, and of 128 MiB
    for name, size in sizes.items():
        number = 8 if machine.dry or name == "large" else 4096
        tensors = [torch.randn(size, device=device).bfloat16() for _ in range(2 * number)]
        names = [str(i) for i in range(number)]
        sources = dict(zip(names, tensors[:number], strict=True))
        destinations = dict(zip(names, tensors[number:], strict=True))
        view = View("", 0, (size[0] * size[1],), (1,))
        copies = [
            Copy(replace(view, name=n), replace(view, name=n), 0, is_plain=True) for n in names
        ]
        for way, bound in (("single", 0), ("together", 1 << 62)):
            prepared = Prepared(copies, sources, destinations, bound)
            took = machine.seconds(prepared.run)
            outcome.figures[f"{name}_{way}_s"] = round(took, 6)
        assert all(torch.equal(sources[n], destinations[n]) for n in names)
    outcome.figures["single_from_bytes"] = SINGLE_BYTES


def _sync(learner: Peer, server: Server, direct: bool, tp: int = 1) -> tuple[Ack, Ack]:
    """The first acknowledgement, and the quickest of the later ones."""
    acks = []
    for version in range(REPEATS + 1):
        text = learner.ask("message", tp, version, direct)
        acks.append(server.receive(text))
        assert acks[-1].ok, acks[-1].error
        learner.ask("withdraw")
    return acks[0], min(acks[1:], key=lambda ack: ack.copy_s + ack.check_s)
