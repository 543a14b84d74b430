"""Copies put together: the same bytes as single moves, in few calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megarl.actor.shape import ModelShape
from megarl.reshard import execute
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.moves import Move
from megarl.weight_sync import batches, compiled
from megarl.weight_sync.control import SourceSpec
from megarl.weight_sync.inflow import ArenaInflow
from tests.reshard.models import tiny_shape
from tests.weight_sync import tiny
from tests.weight_sync.rig import Rig

QWEN3, GLM = tiny_shape("Qwen3MoeForCausalLM"), tiny_shape("Glm4MoeForCausalLM")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("shape", "mesh", "server", "forms"),
    [
        (tiny.SHAPE, LearnerMesh(), ServerMesh(1), ("te", "sequential")),
        (tiny.SHAPE, LearnerMesh(tp=2, pp=2), ServerMesh(2), ("te", "sequential")),
        (QWEN3, LearnerMesh(tp=2, dp=2, ep=4), ServerMesh(4, ep=2), ("te", "sequential")),
        (GLM, LearnerMesh(tp=2, ep=2), ServerMesh(2), ("te", "per_expert")),
    ],
)
def test_batches_bring_the_same_bytes_as_single_moves(
    rig: Callable[..., Rig],
    monkeypatch: pytest.MonkeyPatch,
    shape: ModelShape,
    mesh: LearnerMesh,
    server: ServerMesh,
    forms: tuple[str, ...],
    dtype: str,
) -> None:
    made = rig(SourceSpec(shape, mesh, 8, forms), server, dtype)
    assert made.sync(1) == []
    single = [{n: t.clone() for n, t in model.tensors.items()} for model in made.models]
    for model in made.models:
        for parameter in model.tensors.values():
            parameter.data.fill_(torch.nan)
    monkeypatch.setattr(batches, "pays", lambda device: True)
    assert made.sync(2) == []
    for model, wanted in zip(made.models, single, strict=True):
        for name, tensor in wanted.items():
            assert torch.equal(model.tensors[name].view(torch.uint8), tensor.view(torch.uint8))
    made.learn(5)
    prepared = [r._inflows[0]._prepared for r in made.receivers]  # type: ignore[attr-defined]
    before = [dict(each) for each in prepared]
    assert made.sync(3) == [] and prepared == before  # nothing has moved
    for model in made.models:
        for parameter in model.tensors.values():
            parameter.data = torch.full_like(parameter, torch.nan)
    assert made.sync(4) == [] and all(p != b for p, b in zip(prepared, before, strict=True))


def test_a_dense_layer_takes_no_more_than_ten_copies_and_all_layers_a_few_calls(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    run = batches.Prepared.run
    monkeypatch.setattr(batches, "pays", lambda device: True)
    monkeypatch.setattr(batches.Prepared, "run", lambda self: calls.append(run(self)))
    shape = tiny_shape(num_heads=16, num_kv_heads=8, hidden_size=64, num_layers=4)
    made = rig(SourceSpec(shape, LearnerMesh(), 8), ServerMesh(1))
    assert made.sync(1) == []
    inflow = made.receivers[0]._inflows[0]
    assert isinstance(inflow, ArenaInflow)
    copies = inflow._prepared[0][1].copies
    moves = made.receivers[0]._route.sources[0].moves  # type: ignore[union-attr]
    of_layer = [copy for copy in copies if ".layers.1." in copy.destination.name]
    assert len(moves) > 4 * 30  # query, key and value heads of 8 groups, each on its own
    assert len(of_layer) <= 10 and len(calls) == 1 and calls[0] <= 4


def test_units_are_as_wide_as_both_sides_allow_and_types_are_kept_apart() -> None:
    def carried_out(columns: int, at: int, dtype: torch.dtype, to: torch.dtype) -> batches.Copy:
        """One copy of some columns between whole tensors."""
        source = {"w": torch.randn(4, 48).to(dtype)}
        single, together = ({"v": torch.zeros(4, 48, dtype=to)} for _ in range(2))
        moves = [Move(0, 0, "w", ((0, 4), (0, columns)), "w", (0, 0), "v", (0, at))]
        execute.run(moves, source, single)
        copies = batches.batch(moves, source, together)
        for single_bytes in (1, 1 << 20):
            together["v"].zero_()
            assert batches.Prepared(copies, source, together, single_bytes).run() == 1
            assert torch.equal(single["v"], together["v"]) and single["v"].count_nonzero()
        return copies[0]

    bf16, fp32 = torch.bfloat16, torch.float32
    assert [carried_out(c, 8, bf16, bf16).unit for c in (16, 12, 10, 9)] == [16, 8, 4, 2]
    assert carried_out(16, 4, bf16, bf16).unit == 8
    assert carried_out(16, 2, fp32, fp32).unit == 8
    assert carried_out(48, 0, fp32, fp32).is_plain and not carried_out(40, 0, fp32, fp32).is_plain
    mixed = carried_out(48, 0, bf16, fp32)
    assert not mixed.is_plain and mixed.unit == 0


def test_copy_is_plain_only_where_both_sides_are_contiguous() -> None:
    whole, parted = {"w": torch.randn(4, 12)}, {"v": torch.zeros(4, 48)}
    for source, destination in ((whole, parted), (parted, whole)):
        ((of, _),), ((to, _),) = source.items(), destination.items()
        move = Move(0, 0, "w", ((0, 4), (0, 12)), of, (0, 0), to, (0, 0))
        (copy,) = batches.batch([move], source, destination)
        assert not copy.is_plain and batches.Prepared((copy,), source, destination, 1).run() == 1
    assert torch.equal(parted["v"][:, :12], whole["w"])


def test_neighbouring_dims_become_one_where_both_sides_allow_it() -> None:
    def folded(of: tuple[int, int], to: tuple[int, int]) -> tuple[int, ...]:
        views = [
            batches.View(name, 0, (2, 8), strides)
            for name, strides in zip("wv", (of, to), strict=True)
        ]
        return batches._folded(batches.Copy(views[0], views[1])).source.sizes

    assert folded((8, 1), (8, 1)) == (16,)
    assert folded((9, 1), (8, 1)) == folded((8, 1), (9, 1)) == (2, 8)


@pytest.mark.parametrize("past_caches", [False, True], ids=["torch", "past caches"])
@pytest.mark.parametrize("part_bytes", [1, 600, 1 << 20])
def test_copies_on_a_cpu_are_the_same_in_parts_of_any_size(
    monkeypatch: pytest.MonkeyPatch, in_c: compiled.Library, part_bytes: int, past_caches: bool
) -> None:
    monkeypatch.setattr(batches.parts, "num_threads", lambda: 3)
    calls: list[int] = []
    copy = in_c.copy
    monkeypatch.setattr(compiled, "find", lambda: in_c)
    monkeypatch.setattr(in_c, "copy", lambda *args: (calls.append(args[2]), copy(*args)))
    dtype = torch.float32 if past_caches else torch.bfloat16
    source = {name: torch.randn(12, 50) for name in "ab"} | {"c": torch.randn(1, 4, 7)}
    boxes = [("a", ((0, 12), (0, 50))), ("b", ((2, 9), (5, 40))), ("b", ((9, 12), (0, 5)))]
    moves = [Move(0, 0, name, box, name, (0, 0), name, (0, 0)) for name, box in boxes]
    moves.append(Move(0, 0, "c", ((3, 4), (0, 4), (0, 7)), "c", (0, 0, 0), "c", (0, 0)))
    num_bytes = dtype.itemsize * (12 * 50 + 7 * 35 + 3 * 5 + 4 * 7)
    monkeypatch.setattr(batches, "PAST_CACHES_BYTES", num_bytes + (not past_caches))
    single, together = (
        {name: torch.zeros(12, 50, dtype=dtype) for name in "ab"}
        | {"c": torch.zeros(4, 7, dtype=dtype)}
        for _ in range(2)
    )
    execute.run(moves, source, single)
    batches.OneByOne(moves, source, together, part_bytes).run()
    assert all(torch.equal(single[name], together[name]) for name in single)
    assert all(tensor.count_nonzero() for tensor in together.values())
    assert (sum(calls) >= 12 * 50 * 4) == past_caches  # what is strided goes by torch
