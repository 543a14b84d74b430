"""Servers that read the learner's parameters in place: what they get, and what they refuse."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megarl.errors import WeightSyncError
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.weight_sync.control import SourceSpec
from megarl.weight_sync.inflow import ArenaInflow
from megarl.weight_sync.places import ServerKind
from megarl.weight_sync.receiver import Receiver
from megarl.weight_sync.transport.in_place import InPlaceReader, live_memory
from megarl.weight_sync.transport.shared import HEADER_BYTES, Arena
from tests.reshard.models import tiny_shape
from tests.weight_sync import tiny
from tests.weight_sync.rig import Rig
from tests.weight_sync.tiny import SHAPE

DEEPSEEK = tiny_shape("DeepseekV3ForCausalLM")
RUN, DIGEST = f"inplace{os.getpid()}", "a" * 64


@pytest.fixture
def shared(rig: Callable[..., Rig]) -> Rig:
    """TP2 to TP2 out of shared memory, with a first good sync behind it."""
    made = rig(SourceSpec(SHAPE, LearnerMesh(tp=2)), ServerMesh(2), shares=True)
    assert made.sync(1) == []
    return made


def _files(rig: Rig) -> dict[str, int]:
    return {p.name: p.stat().st_size for p in Path("/dev/shm").glob(f"megarl_{rig.run_id}_*")}


@pytest.mark.parametrize("mesh", [LearnerMesh(tp=2, pp=2), LearnerMesh(dp=2), LearnerMesh()])
@pytest.mark.parametrize("tp", [1, 2])
def test_parameters_arrive_without_being_staged(
    rig: Callable[..., Rig], mesh: LearnerMesh, tp: int
) -> None:
    made = rig(SourceSpec(SHAPE, mesh), ServerMesh(tp), shares=True)
    for version, seed in enumerate([3, 4]):
        made.learn(seed)
        assert made.sync(version) == []
        wanted = tiny.on_server(SHAPE, tp, tiny.weights(SHAPE, seed))
        for model, tensors in zip(made.models, wanted, strict=True):
            for name, tensor in tensors.items():
                assert torch.equal(model.tensors[name], tensor), name
    sizes = _files(made)
    live = {name for name in sizes if "_live_" in name}
    assert len(live) == mesh.size
    assert max(size for name, size in sizes.items() if name not in live) < 64 << 10
    assert min(sizes[name] for name in live) > 64 << 10


def test_servers_of_two_kinds_read_the_same_memory(shared: Rig) -> None:
    other = ServerKind(ServerMesh(1))
    refs = [sender.stage(other, 1, "1.a") for sender in shared.senders]
    assert all(ref is not None and ref.table_bytes for ref in refs)
    assert len([name for name in _files(shared) if "_live_" in name]) == 2


def test_table_that_was_overwritten_from_outside_is_made_anew(shared: Rig) -> None:
    messages = shared.messages(2)
    with (Path("/dev/shm") / messages[0].arenas[0].name).open("r+b") as file:
        file.seek(HEADER_BYTES + 3)
        file.write(b"\x00")
    shared.receivers = [Receiver(lambda: None) for _ in range(2)]  # as after a server's restart
    assert all("table cannot be read" in ack.error for ack in shared.receive(messages))
    assert shared.sync(3) == []


def test_parameters_whose_memory_was_removed_from_outside_are_staged(shared: Rig) -> None:
    for path in Path("/dev/shm").glob(f"megarl_{shared.run_id}_live_*"):
        path.unlink()
    shared.receivers = [Receiver(lambda: None) for _ in range(2)]
    shared.learn(6)
    messages = shared.messages(3)
    assert not any(ref.table_bytes for ref in messages[0].arenas.values())
    assert shared.differences(shared.receive(messages)) == []


def test_parameters_that_are_about_to_change_are_refused(shared: Rig) -> None:
    messages = shared.messages(2)
    for sender in shared.senders:
        sender.withdraw()
    for ack in shared.receive(messages):
        assert not ack.ok and "of another publish" in ack.error
    assert shared.sync(3) == []


def test_parameters_that_change_while_they_are_read_are_refused(
    shared: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = ArenaInflow.fill

    def late(inflow: ArenaInflow, *args: object) -> None:
        fill(inflow, *args)  # type: ignore[arg-type]
        for sender in shared.senders:
            sender.withdraw()
        shared.learn(9)

    messages = shared.messages(2)
    monkeypatch.setattr(ArenaInflow, "fill", late)
    assert all("of another publish" in ack.error for ack in shared.receive(messages))


def test_parameters_in_another_format_than_the_wire_are_staged(rig: Callable[..., Rig]) -> None:
    made = rig(SourceSpec(SHAPE, LearnerMesh()), ServerMesh(1), "bf16", shares=True)
    assert made.sync(1) == []
    (ref,) = made.messages(2)[0].arenas.values()
    assert not ref.table_bytes


def staged_bytes(rig: Rig, version: int) -> int:
    """Bytes that a publish copies, besides the tables of what it does not."""
    refs = rig.messages(version)[0].arenas.values()
    return sum(ref.num_bytes - ref.table_bytes for ref in refs)


def test_parameters_outside_the_memory_are_staged_and_no_others(rig: Callable[..., Rig]) -> None:
    made = rig(SourceSpec(DEEPSEEK, LearnerMesh(tp=2), 8), ServerMesh(2), shares=True)
    for mine in made.learner:  # a buffer of Megatron's router, and none of its parameters
        mine.update({k: v.clone() for k, v in mine.items() if k.endswith("expert_bias")})
    assert made.sync(1) == []
    routes = [sender.route(made.kind) for sender in made.senders]
    read = [name for route in routes for name in route.slots if name.endswith("expert_bias")]
    assert staged_bytes(made, 2) == 64 * len(read) > 0  # 4 bytes for each of 4 experts, aligned
    assert sum(route.num_bytes for route in routes) > 18_000  # which would be staged otherwise
    for version, seed in ((4, 8), (5, 9)):
        made.learn(seed)
        assert made.sync(version) == []  # copied anew each time
    made.receivers = [Receiver(lambda: None) for _ in range(2)]
    made.learn(10)
    acks = made.receive(made.messages(6, generation=1))
    assert made.differences(acks) == []


def test_parameter_in_another_format_than_the_wire_is_staged_alone(
    rig: Callable[..., Rig],
) -> None:
    made = rig(SourceSpec(SHAPE, LearnerMesh()), ServerMesh(1), shares=True)
    name = "decoder.final_layernorm.weight"
    made.learner[0][name] = made.learner[0][name].double()
    assert made.sync(1) == []
    assert staged_bytes(made, 2) == 4 * SHAPE.hidden_size


def test_none_in_the_memory_has_all_staged(rig: Callable[..., Rig]) -> None:
    made = rig(SourceSpec(SHAPE, LearnerMesh()), ServerMesh(1), shares=True)
    for name, tensor in made.learner[0].items():
        made.learner[0][name] = tensor.clone()
    assert made.sync(1) == []
    (ref,) = made.messages(2)[0].arenas.values()
    assert not ref.table_bytes


def test_memory_of_another_learner_is_refused(shared: Rig) -> None:
    sender, memory = shared.senders[0], shared.memories[0]
    assert memory is not None
    kept = memory.ref
    memory.ref = dataclasses.replace(kept, nonce="0" * 32)
    sender._arenas.clear()
    messages = shared.messages(2, generation=1)
    memory.ref = kept
    acks = shared.receive(messages)
    assert all(not ack.ok and "stale or belongs to another run" in ack.error for ack in acks)


def _arena(table: object) -> Arena:
    text = json.dumps(table).encode()
    arena = Arena(RUN, 0, 0, len(text), DIGEST)
    arena.data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    arena.ref = dataclasses.replace(arena.ref, table_bytes=len(text))
    return arena


@pytest.mark.parametrize(
    "stretch",
    [[0, 128, 192, True], [0, 64, 0, True], [64, 128, 0, True], [0, 128, 0, False]],
)
def test_table_that_points_beyond_the_memory_or_elsewhere_is_refused(stretch: list[int]) -> None:
    memory = live_memory(RUN, 0, 256)
    arena = _arena([dataclasses.asdict(memory.ref), [stretch]])
    reader = InPlaceReader(arena.ref, DIGEST)
    with pytest.raises(WeightSyncError, match=r"nothing whole at bytes \[0, 128\) in the 256"):
        reader.view(0, 128)
    arena.close()
    memory.close()


@pytest.mark.parametrize("in_memory", [True, False])
def test_place_of_what_is_read_names_the_arena_where_it_holds_copies_alone(in_memory: bool) -> None:
    """What was prepared to read from one memory serves on where its small table is made anew."""
    memory = live_memory(RUN, 0, 256)
    arena = _arena([dataclasses.asdict(memory.ref), [[0, 128, 0, in_memory]]])
    reader = InPlaceReader(arena.ref, DIGEST)
    assert (reader.where[2] is None) == in_memory
    reader.close()
    arena.close()
    memory.close()


def test_table_without_a_memory_is_refused() -> None:
    arena = _arena([{}, []])
    with pytest.raises(WeightSyncError, match="table cannot be read"):
        InPlaceReader(arena.ref, DIGEST)
    arena.close()
