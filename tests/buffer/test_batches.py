"""Minibatches: everything once, equal counts on all ranks, within the budget."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.actor.flops import SequenceFlops
from megarl.buffer.batches import BatchShape, make_batch, scheduled_for, split_minibatches
from megarl.buffer.schedule import ScheduleShape
from megarl.config.schema import Config
from megarl.types import Batch, MinibatchPlan, SampleRef


def ref(name: str, num_tokens: int, num_loss_tokens: int = 1, version: int = 0) -> SampleRef:
    return SampleRef(name, f"{name[:2]}.safetensors", 0, num_tokens, num_loss_tokens, 0.5, version)


def group(index: int, lengths: list[int]) -> tuple[SampleRef, ...]:
    return tuple(ref(f"g{index:03d}-{i:03d}", n, max(1, n // 2)) for i, n in enumerate(lengths))


def names(plan: MinibatchPlan) -> list[str]:
    return [r.sample_id for rank in plan.schedule for micro in rank for r in micro]


def shape(data_parallel: int = 2, max_tokens: int = 64, **changes: int) -> BatchShape:
    settings = {"num_minibatches": 4, "num_epochs": 1, "seed": 0, **changes}
    schedule = ScheduleShape(data_parallel, max_tokens, SequenceFlops(1.0, 0.0, 0.0))
    return BatchShape(**settings, schedule=schedule)


lengths = st.lists(st.integers(1, 50), min_size=1, max_size=8)
batches = st.lists(lengths, min_size=0, max_size=12)


@settings(max_examples=150)
@given(batches, st.integers(1, 4), st.integers(1, 5), st.integers(50, 120), st.integers(1, 3))
def test_every_epoch_schedules_every_sample_once_within_budget_with_equal_counts(
    sizes: list[list[int]], data_parallel: int, minibatches: int, budget: int, epochs: int
) -> None:
    groups = [group(i, lengths) for i, lengths in enumerate(sizes)]
    wanted = shape(
        num_minibatches=minibatches,
        data_parallel=data_parallel,
        max_tokens=budget,
        num_epochs=epochs,
    )
    batch = make_batch(groups, 7, wanted)
    everything = sorted(r.sample_id for refs in groups for r in refs)
    per_epoch = len(batch.minibatches) // epochs
    for epoch in range(epochs):
        plans = batch.minibatches[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(name for plan in plans for name in names(plan)) == everything
    for plan in batch.minibatches:
        assert len(plan.schedule) == data_parallel
        assert len({len(rank) for rank in plan.schedule}) == 1
        sums = [sum(r.num_tokens for r in micro) for rank in plan.schedule for micro in rank]
        assert max(sums) == plan.microbatch_tokens <= budget
        refs = [r for rank in plan.schedule for micro in rank for r in micro]
        assert plan.num_loss_tokens == sum(r.num_loss_tokens for r in refs) > 0


def test_batch_does_not_depend_on_the_order_in_which_groups_arrived() -> None:
    groups = [group(i, [5, 9, 3]) for i in range(9)]
    assert make_batch(groups, 3, shape()) == make_batch(groups[::-1], 3, shape())


def test_epochs_and_versions_and_seeds_shuffle_differently() -> None:
    groups = [group(i, [4]) for i in range(16)]

    def order(batch: Batch) -> list[list[str]]:
        return [sorted(names(plan)) for plan in batch.minibatches]

    both = order(make_batch(groups, 0, shape(num_epochs=2)))
    assert both[:4] != both[4:]
    assert order(make_batch(groups, 1, shape())) != both[:4]
    assert order(make_batch(groups, 0, shape(seed=1))) != both[:4]


def test_groups_stay_whole_where_there_are_enough_of_them() -> None:
    groups = [group(i, [4] * 4) for i in range(8)]
    parts = split_minibatches(groups, 4)
    assert [len(part) for part in parts] == [8, 8, 8, 8]
    owners = [{r.sample_id[:4] for r in part} for part in parts]
    assert all(len(owner) == 2 for owner in owners) and len(set.union(*owners)) == 8


def test_largest_groups_are_placed_first_and_are_not_cut() -> None:
    parts = split_minibatches([group(0, [3]), group(1, [3]), group(2, [3] * 4)], 2)
    assert [[r.sample_id for r in part] for part in parts] == [
        [f"g002-{i:03d}" for i in range(4)],
        ["g000-000", "g001-000"],
    ]


def test_no_samples_make_no_parts() -> None:
    assert split_minibatches([], 4) == []


def test_one_group_is_cut_into_minibatches_of_equal_counts() -> None:
    parts = split_minibatches([group(0, [3] * 10)], 4)
    assert [len(part) for part in parts] == [2, 3, 2, 3]


def test_fewer_samples_than_minibatches_make_fewer_minibatches() -> None:
    assert [len(part) for part in split_minibatches([group(0, [3, 3])], 4)] == [1, 1]


def test_batch_without_samples_has_no_minibatches() -> None:
    batch = make_batch([(), ()], 5, shape())
    assert batch == Batch(version=5, minibatches=(), worst_staleness=0, num_samples=0)


def test_worst_staleness_is_the_oldest_samples() -> None:
    groups = [(ref("g0-0", 3, version=4),), (ref("g1-0", 3, version=2),)]
    assert make_batch(groups, 5, shape()).worst_staleness == 3


def test_settings_of_a_pipeline_shape_its_schedule() -> None:
    def of(**parallel: int) -> ScheduleShape:
        learner = {"parallel": parallel, "max_tokens_per_microbatch": 99}
        config = Config.model_validate({"actor": {"model": "m"}, "learner": learner})
        return BatchShape.of(config, SequenceFlops(1.0, 2.0, 3.0)).schedule

    flops = SequenceFlops(1.0, 2.0, 3.0)
    assert of() == ScheduleShape(1, 99, flops)
    assert of(pp=4) == ScheduleShape(1, 99, flops, is_pipelined=True)
    assert of(pp=4, vpp=2) == ScheduleShape(1, 99, flops, is_pipelined=True, count=4)
    assert of(cp=4) == ScheduleShape(1, 99, flops, sequence_multiple=8, token_multiple=4)
    assert of(tp=2) == ScheduleShape(1, 99, flops, token_multiple=2)


@given(batches, st.integers(1, 4), st.integers(1, 3))
def test_batch_scheduled_for_other_ranks_has_the_same_minibatches(
    sizes: list[list[int]], data_parallel: int, epochs: int
) -> None:
    groups = [group(i, lengths) for i, lengths in enumerate(sizes)]
    batch = make_batch(groups, 7, shape(num_epochs=epochs))
    other = scheduled_for(batch, shape(data_parallel, max_tokens=128).schedule)
    assert (other.version, other.num_samples) == (batch.version, batch.num_samples)
    for mine, theirs in zip(batch.minibatches, other.minibatches, strict=True):
        assert sorted(names(mine)) == sorted(names(theirs))
        assert mine.num_loss_tokens == theirs.num_loss_tokens
        assert len(theirs.schedule) == data_parallel
