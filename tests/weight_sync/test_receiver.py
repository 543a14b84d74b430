"""Sender and receiver in one process, over real arenas, without a server."""

from __future__ import annotations

import dataclasses
import gc
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.errors import WeightSyncError
from megarl.reshard import execute
from megarl.reshard.layout import num_elements
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.weight_sync import compiled, coverage, receiver
from megarl.weight_sync.acks import Ack, AckBoard
from megarl.weight_sync.checksum import box_checksum
from megarl.weight_sync.control import WIRE_DTYPES, SourceSpec, decode
from megarl.weight_sync.receiver import Receiver
from tests.reshard.models import tiny_shape
from tests.weight_sync import tiny
from tests.weight_sync.open_files import open_files
from tests.weight_sync.rig import Rig
from tests.weight_sync.tiny import SHAPE


@pytest.fixture
def simple(rig: Callable[..., Rig]) -> Rig:
    """TP2 to TP2, with a first good sync behind it."""
    made = rig(SourceSpec(SHAPE, LearnerMesh(tp=2)), ServerMesh(2))
    assert made.sync(1) == []
    return made


TIED = tiny_shape(tie_embeddings=True, num_kv_heads=4, num_heads=4, intermediate_size=32)
BIASED = tiny_shape("Qwen2ForCausalLM", num_heads=8, num_kv_heads=2)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("shape", "mesh", "tp"),
    [
        (SHAPE, LearnerMesh(), 1),
        (SHAPE, LearnerMesh(tp=2, pp=2, dp=2), 2),
        (TIED, LearnerMesh(tp=4, pp=2), 1),
        (TIED, LearnerMesh(pp=2, dp=3), 4),
        (BIASED, LearnerMesh(tp=4), 8),
    ],
)
def test_every_server_rank_ends_with_exactly_its_slices(
    rig: Callable[..., Rig], shape: object, mesh: LearnerMesh, tp: int, dtype: str
) -> None:
    made = rig(SourceSpec(shape, mesh, 8), ServerMesh(tp), dtype)  # type: ignore[arg-type]
    for version, seed in enumerate([3, 4]):
        made.learn(seed)
        assert made.sync(version) == []
        wanted = tiny.on_server(made.source.shape, tp, tiny.weights(made.source.shape, seed))
        for model, tensors in zip(made.models, wanted, strict=True):
            assert model.tensors.keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert torch.equal(model.tensors[name], tensor.to(WIRE_DTYPES[dtype])), name


def test_every_left_out_move_is_seen_in_the_checksums(simple: Rig) -> None:
    route = simple.receivers[1]._route
    assert route is not None
    moves = [(rank, i) for rank, s in route.sources.items() for i in range(len(s.moves))]
    simple.learn(5)
    messages = simple.messages(2)
    for rank, left_out in moves:
        for model in simple.models:
            for parameter in model.tensors.values():
                parameter.data.fill_(torch.nan)
        source = route.sources[rank]
        kept = tuple(move for i, move in enumerate(source.moves) if i != left_out)
        sources = {**route.sources, rank: dataclasses.replace(source, moves=kept)}
        simple.receivers[1]._route = dataclasses.replace(route, sources=sources)
        wrong = simple.differences(simple.receive(messages))
        assert len(wrong) == 1 and source.moves[left_out].tensor in wrong[0]
    simple.receivers[1]._route = route
    assert simple.sync(3) == []


def test_a_doubled_or_swapped_copy_is_seen_in_the_checksums(simple: Rig) -> None:
    simple.learn(5)
    messages = simple.messages(2)
    assert simple.differences(simple.receive(messages)) == []
    name = "model.layers.1.mlp.down_proj.weight"
    down = simple.models[0].tensors[name].data
    piece = next(
        p
        for p in coverage.held(simple.senders[0].route(simple.kind).destination)[0]
        if p.local == name
    )
    before = box_checksum(down, piece.tensor, (64, 64), piece.box)
    for tamper in (
        lambda: down[[0, 1]].clone(),  # swapped rows
        lambda: down[[1, 1]].clone(),  # one row twice
        lambda: down[[0, 1]].clone() * -1,
    ):
        kept = down.clone()
        down[[1, 0]] = tamper()
        assert box_checksum(down, piece.tensor, (64, 64), piece.box) != before
        down.copy_(kept)


def test_copies_that_differ_are_named_with_their_ranks(rig: Callable[..., Rig]) -> None:
    made = rig(SourceSpec(SHAPE, LearnerMesh()), ServerMesh(2))
    acks = made.receive(made.messages(1))
    pieces = coverage.held(made.senders[0].route(made.kind).destination)
    at = next(i for i, piece in enumerate(pieces[1]) if piece.tensor == "model.norm.weight")
    sums = (*acks[1].sums[:at], acks[1].sums[at] ^ 1, *acks[1].sums[at + 1 :])
    wrong = made.differences([acks[0], dataclasses.replace(acks[1], sums=sums)])
    assert (
        len(wrong) == 1 and "model.norm.weight" in wrong[0] and "ranks 0 and 1 differ" in wrong[0]
    )


def test_replicas_of_the_learner_that_have_diverged_are_seen(rig: Callable[..., Rig]) -> None:
    made = rig(SourceSpec(SHAPE, LearnerMesh(dp=2)), ServerMesh(1))
    assert made.sync(1) == []
    for tensor in made.learner[1].values():
        tensor.add_(1e-3)
    assert made.sync(2)


def test_bytes_of_another_publish_are_refused(simple: Rig) -> None:
    messages = [dataclasses.replace(message, version=3) for message in simple.messages(2)]
    for ack in simple.receive(messages):
        assert not ack.ok and "its bytes are of another publish" in ack.error


def test_arena_with_another_nonce_is_refused(simple: Rig) -> None:
    messages = simple.messages(2)
    arenas = {r: dataclasses.replace(a, nonce="0" * 32) for r, a in messages[0].arenas.items()}
    acks = simple.receive([dataclasses.replace(m, arenas=arenas) for m in messages])
    assert all(not ack.ok and "stale or belongs to another run" in ack.error for ack in acks)
    assert simple.sync(4) == []


def test_message_of_another_rank_is_refused_before_anything_is_written(simple: Rig) -> None:
    messages = simple.messages(2)[::-1]
    simple.receivers = [Receiver(lambda rank=rank: rank) for rank in range(2)]  # type: ignore[misc]
    kept = [tensor.detach().clone() for tensor in simple.models[0].tensors.values()]
    acks = simple.receive(messages)
    assert ["got the message of TP rank" in ack.error for ack in acks] == [True, True]
    for tensor, before in zip(simple.models[0].tensors.values(), kept, strict=True):
        assert torch.equal(tensor, before)


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_are_not_sent_and_their_tensor_is_named(
    simple: Rig, value: float, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        monkeypatch.setattr(compiled, "find", lambda: None)
    simple.learner[1]["decoder.layers.0.mlp.linear_fc2.weight"][3, 5] = value
    with pytest.raises(WeightSyncError, match=r"down_proj.*1 of 2048 weights are not finite"):
        simple.senders[1].checksums()
    simple.senders[0].checksums()


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(8)
        file.write(b"0" * 32)


@pytest.mark.parametrize("harm", [Path.unlink, _cut, _overwrite])
def test_arena_that_was_harmed_from_outside_is_refused_and_made_anew_for_the_next_sync(
    simple: Rig, harm: Callable[[Path], None]
) -> None:
    simple.learn(5)
    messages = simple.messages(2)
    harm(Path("/dev/shm") / messages[0].arenas[0].name)
    if harm is not Path.unlink:  # whoever has it mapped still reads it
        acks = simple.receive(messages)
        assert all("or belongs to another run; refused" in ack.error for ack in acks)
    simple.receivers = [Receiver(lambda: None) for _ in range(2)]  # as after a server's restart
    simple.learn(6)
    assert simple.sync(3) == []


def test_ranks_agree_whether_another_learner_is_at_their_server(simple: Rig) -> None:
    first, second = AckBoard("127.0.0.1"), AckBoard("127.0.0.1")
    old = [dataclasses.replace(m, store=first.address) for m in simple.messages(2)]
    assert all(ack.ok for ack in simple.receive(old))
    first.put(old[0].busy_key, "here")
    simple.learn(5)
    new = [dataclasses.replace(m, store=second.address) for m in simple.messages(3)]
    told = []
    with torch.no_grad():
        for receiver_of_rank, model, message in zip(
            simple.receivers, simple.models, new, strict=True
        ):
            told.append(receiver_of_rank.receive(model, message).error)
            first.forget([old[0].busy_key])  # it ends before the second rank looks
    assert ["is syncing this server to version 2" in error for error in told] == [True, True]
    later = [dataclasses.replace(m, store=second.address) for m in simple.messages(4)]
    assert all(ack.ok for ack in simple.receive(later))


def test_learner_whose_store_does_not_answer_holds_up_no_server(
    simple: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.weight_sync.transport.stores.CONNECT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # as of a learner that is stopped
        address = ("127.0.0.1", silent.getsockname()[1])
        message = dataclasses.replace(simple.messages(2)[0], store=address)
        start = time.monotonic()
        with pytest.raises(WeightSyncError, match="TP rank 0: learner rank 0's store does not"):
            simple.receivers[0].acknowledge(message, Ack("t", True))
        assert time.monotonic() - start < 5


def test_rank_that_refuses_for_another_keeps_no_connection_for_it(simple: Rig) -> None:
    """A rank in no group that is given the message of one that is."""
    board = AckBoard("127.0.0.1")
    other = dataclasses.replace(
        simple.messages(2)[1], store=board.address, members=("learner rank 0", "TP rank 1")
    )
    keys = board.num_keys
    gc.collect()  # of tests before
    before = Counter(open_files())
    refusal = simple.receivers[0].receive(simple.models[0], other)  # type: ignore[arg-type]
    assert not refusal.ok
    assert board.num_keys > keys  # the others are told, so that they do not wait
    gc.collect()
    assert not Counter(open_files()) - before


def test_server_with_another_number_format_refuses(rig: Callable[..., Rig]) -> None:
    made = rig(SourceSpec(SHAPE, LearnerMesh()), ServerMesh(1), "bf16", "fp32")
    (ack,) = made.receive(made.messages(1))
    assert not ack.ok and "torch.float32 on the server" in ack.error
    assert all(torch.isnan(parameter).all() for parameter in made.models[0].tensors.values())


def test_server_with_other_parameters_refuses_and_names_them(simple: Rig) -> None:
    kept = dict(simple.models[0].tensors)
    simple.models[0].tensors["model.extra"] = kept["model.norm.weight"]
    del simple.models[0].tensors["lm_head.weight"]
    acks = simple.receive(simple.messages(2))
    assert "model.extra" in acks[0].error and "lm_head.weight" in acks[0].error
    assert acks[1].ok
    simple.models[0].tensors = {**kept, "model.norm.weight": torch.nn.Parameter(torch.zeros(3))}
    assert "(3,)" in simple.receive(simple.messages(3))[0].error


def test_plan_of_another_planner_is_refused(simple: Rig) -> None:
    messages = [dataclasses.replace(m, plan_digest="0" * 64) for m in simple.messages(2)]
    assert all("one version of megarl" in ack.error for ack in simple.receive(messages))


def test_server_on_another_host_is_told_so(simple: Rig) -> None:
    messages = simple.messages(2)
    arenas = {
        rank: dataclasses.replace(ref, name=ref.name.replace("_g0_", "_g9_"), host="elsewhere")
        for rank, ref in messages[0].arenas.items()
    }
    acks = simple.receive([dataclasses.replace(m, arenas=arenas) for m in messages])
    assert all("runs on another host than the learner" in ack.error for ack in acks)


def test_receiver_never_raises_whatever_it_is_handed(simple: Rig) -> None:
    receiver.load(simple.models[0], [])
    receiver.load(simple.models[0], [("not json", torch.zeros(1))])
    receiver.load(simple.models[0], [("{}", torch.zeros(1)), ("{}", torch.zeros(1))])
    broken = dataclasses.replace(simple.messages(2)[0], tp_rank=99)
    ack = Receiver().receive(simple.models[0], broken)
    assert not ack.ok and ack.error


def test_padding_is_zeroed_whatever_was_there(simple: Rig) -> None:
    mine = simple.senders[0].route(simple.kind).destination.ranks[1]
    assert mine.paddings
    for padding in mine.paddings:
        tail = simple.models[1].tensors[padding.local][execute.slices(padding.box)]
        assert not torch.count_nonzero(tail)


def test_arena_is_mapped_once_and_the_old_one_is_dropped(simple: Rig) -> None:
    def mapped() -> list[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return [line.rsplit("/", 1)[1] for line in lines if f"megarl_{simple.run_id}_" in line]

    before = sorted(mapped())
    for version in range(2, 6):
        assert simple.sync(version) == []
    assert sorted(mapped()) == before
    assert simple.differences(simple.receive(simple.messages(6, generation=1))) == []
    after = mapped()
    assert len(after) == len(before) and all("_g1_" in name for name in after)


def test_rank_is_the_one_that_sglang_has_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "sglang.srt.runtime_context"
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert receiver.engine_rank() is None
    context = SimpleNamespace(get_parallel=lambda: SimpleNamespace(tp_rank=3))
    monkeypatch.setitem(sys.modules, name, context)
    assert receiver.engine_rank() == 3


def test_server_takes_another_learners_plan_after_the_first(simple: Rig, rig: Any) -> None:
    other = rig(SourceSpec(SHAPE, LearnerMesh(pp=2)), ServerMesh(2))
    other.receivers, other.models = simple.receivers, simple.models
    other.learn(5)
    assert other.sync(2) == []
    wanted = tiny.on_server(SHAPE, 2, tiny.weights(SHAPE, 5))
    for model, tensors in zip(simple.models, wanted, strict=True):
        assert all(torch.equal(model.tensors[name], tensor) for name, tensor in tensors.items())


def test_arena_is_kept_from_sync_to_sync_and_what_was_taken_is_told(simple: Rig) -> None:
    first = simple.messages(2)
    for sender in simple.senders:
        sender.withdraw()
    second = simple.messages(3)
    assert [m.arenas for m in first] == [m.arenas for m in second]
    route = simple.senders[0].route(simple.kind)
    for rank, ack in enumerate(simple.receive(second)):
        held = sum(tensor.numel() for tensor in simple.models[rank].tensors.values())
        padding = sum(num_elements(p.box) for p in route.destination.ranks[rank].paddings)
        assert sum(ack.moved_bytes.values()) == 4 * (held - padding)


def test_receiver_imports_no_engine_and_sender_no_sglang() -> None:
    code = (
        "import sys, megarl.weight_sync.receiver, megarl.weight_sync.session;"
        "sys.exit(', '.join({'megatron', 'sglang', 'transformers'} & set(sys.modules)) or 0)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_control_message_survives_its_way_through_a_payload(simple: Rig) -> None:
    message = simple.messages(2)[1]
    assert decode([(message.to_json(), torch.zeros(1))]) == message


def test_padding_of_the_learner_may_hold_what_is_no_number(rig: Callable[..., Rig]) -> None:
    made = rig(SourceSpec(SHAPE, LearnerMesh()), ServerMesh(1))
    padded = [t for t in made.learner[0].values() if t.shape[0] > SHAPE.vocab_size]
    assert padded
    for tensor in padded:
        tensor[SHAPE.vocab_size :] = torch.nan
    assert made.sync(1) == []
