"""Packing: alignment of targets, padding, equal lengths, and what it refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from megarl.errors import DataError, ShapeError
from megarl.learner.packing import (
    PADDING_TOKENS,
    Multiples,
    check_plan,
    pack_minibatch,
    pack_sequences,
    token_counts,
)
from megarl.reshard.mesh import LearnerMesh
from megarl.types import MinibatchPlan, Sample, SampleRef
from tests.learner import recorded

VOCAB_SIZE = 50


@pytest.fixture
def made(tmp_path: Path) -> list[tuple[Sample, SampleRef]]:
    """The recorded samples, with behavior log-probs about -2."""
    return recorded.record(tmp_path, VOCAB_SIZE, lambda sample: [-2.0] * len(sample.response_ids))


@pytest.mark.parametrize("data_parallel", [1, 2])
def test_every_loss_token_is_predicted_once_from_the_token_before_it(
    made: list[tuple[Sample, SampleRef]], data_parallel: int
) -> None:
    plan = recorded.plan([ref for _, ref in made], data_parallel)
    samples = {ref.sample_id: (sample, ref) for sample, ref in made}
    seen: list[str] = []
    for dp_rank in range(data_parallel):
        packed, _ = pack_minibatch(plan, dp_rank, Multiples(microbatch=4))
        for microbatch in packed:
            assert microbatch.loss_mask_T.sum() == sum(
                samples[segment.key][1].num_loss_tokens for segment in microbatch.segments
            )
            for segment in microbatch.segments:
                sample, ref = samples[segment.key]
                seen.append(segment.key)
                at = segment.response
                assert microbatch.targets_T[at].tolist() == list(sample.response_ids)
                assert microbatch.loss_mask_T[at].tolist() == list(sample.loss_mask)
                assert microbatch.behavior_logp_T[at].tolist() == list(sample.behavior_logprobs)
                assert microbatch.advantage_T[at].tolist() == pytest.approx(
                    [ref.advantage] * len(sample.response_ids)
                )
                whole = slice(segment.start, segment.start + segment.length)
                tokens = [*sample.prompt_ids, *sample.response_ids]
                assert microbatch.tokens_T[whole].tolist() == tokens
                assert microbatch.positions_T[whole].tolist() == list(range(segment.length))
    assert sorted(seen) == sorted(samples)


def test_in_a_pipeline_all_microbatches_have_one_aligned_length_and_sequences_that_cover_it(
    made: list[tuple[Sample, SampleRef]],
) -> None:
    plan = recorded.plan([ref for _, ref in made], 2)
    lengths = set()
    for dp_rank in range(2):
        packed, length = pack_minibatch(plan, dp_rank, Multiples(microbatch=16, one_length=True))
        assert [len(each.tokens_T) for each in packed] == [length] * 3
        for each in packed:
            assert each.cu_seqlens[0] == 0
            assert each.cu_seqlens[-1] == length
            assert (each.cu_seqlens.diff() > 0).all()
        lengths.add(length)
    assert lengths == {-(-plan.microbatch_tokens // 16) * 16}


def test_without_a_pipeline_a_microbatch_has_its_own_aligned_length(
    made: list[tuple[Sample, SampleRef]],
) -> None:
    plan = recorded.plan([ref for _, ref in made], 1)
    packed, longest = pack_minibatch(plan, 0, Multiples(microbatch=4))
    for refs, microbatch in zip(plan.schedule[0], packed, strict=True):
        total = sum(ref.num_tokens for ref in refs)
        assert len(microbatch.tokens_T) == microbatch.cu_seqlens[-1] == -(-total // 4) * 4
    assert longest == max(len(microbatch.tokens_T) for microbatch in packed)


def test_tokens_of_samples_are_counted_apart_from_padding(
    made: list[tuple[Sample, SampleRef]],
) -> None:
    refs = [ref for _, ref in made]
    packed, _ = pack_minibatch(recorded.plan(refs, 1), 0, Multiples(microbatch=16))
    used, whole = token_counts(packed).tolist()
    assert used == sum(ref.num_tokens for ref in refs)
    assert whole == sum(len(each.tokens_T) for each in packed) and whole % 16 == 0


def test_truncated_sample_is_its_first_tokens(made: list[tuple[Sample, SampleRef]]) -> None:
    sample, ref = made[2]
    num_loss_tokens = sum(sample.loss_mask[:6])
    cut = dataclasses.replace(ref, num_tokens=7, num_loss_tokens=num_loss_tokens, is_truncated=True)
    (one,), _ = pack_minibatch(MinibatchPlan((((cut,),),), 7, num_loss_tokens), 0, Multiples())
    assert one.tokens_T.tolist() == [*sample.prompt_ids, *sample.response_ids[:6]]
    assert one.loss_mask_T.tolist() == [*sample.loss_mask[:6], False]
    with pytest.raises(ShapeError, match="another run"):
        whole = dataclasses.replace(cut, is_truncated=False)
        pack_minibatch(MinibatchPlan((((whole,),),), 7, num_loss_tokens), 0, Multiples())


def test_an_empty_microbatch_is_padding_without_weight(
    made: list[tuple[Sample, SampleRef]],
) -> None:
    plan = recorded.plan([ref for _, ref in made], 2)
    for is_pipelined, length in ((False, 2), (True, plan.microbatch_tokens)):
        multiples = Multiples(microbatch=2 - is_pipelined, one_length=is_pipelined)
        empty = pack_minibatch(plan, 1, multiples)[0][1]
        assert empty.segments == ()
        assert not empty.loss_mask_T.any()
        assert empty.cu_seqlens.tolist() == [0, length] == [0, len(empty.tokens_T)]


def test_long_padding_is_cut_into_short_sequences() -> None:
    (one,), _ = pack_sequences([((1,), (2, 3))], 8, 1, 0, Multiples(microbatch=3 * PADDING_TOKENS))
    assert one.cu_seqlens.tolist() == [0, 3, 1027, 2051, 3 * PADDING_TOKENS]
    assert one.longest == PADDING_TOKENS
    assert (one.positions_T < PADDING_TOKENS).all()


def test_sequences_are_packed_by_budget_with_as_many_microbatches_on_every_rank() -> None:
    sequences = [(range(3), range(n)) for n in (4, 9, 1, 0, 12)]
    multiples = Multiples(microbatch=2)
    ranks = [pack_sequences(sequences, 16, 2, dp_rank, multiples) for dp_rank in range(2)]
    assert len({length for _, length in ranks}) == 1
    assert len({len(microbatches) for microbatches, _ in ranks}) == 1
    keys = [s.key for packed, _ in ranks for each in packed for s in each.segments]
    assert sorted(keys) == ["0", "1", "2", "3", "4"]
    for microbatches, length in ranks:
        assert length <= 16
        assert all(torch.isfinite(each.behavior_logp_T).all() for each in microbatches)


def test_no_sequences_need_no_microbatch() -> None:
    assert pack_sequences([], 16, 2, 0, Multiples(microbatch=2))[0] == []


@pytest.mark.parametrize("pair", [((), (1, 2)), ((1,), tuple(range(40)))])
def test_a_sequence_without_a_prompt_or_beyond_the_budget_is_refused(
    pair: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    with pytest.raises(ShapeError, match="sequence 0"):
        pack_sequences([pair], 16, 1, 0, Multiples())


def test_a_schedule_whose_ranks_differ_in_microbatches_is_refused(
    made: list[tuple[Sample, SampleRef]],
) -> None:
    plan = recorded.plan([ref for _, ref in made], 2)
    check_plan(plan, 2)
    uneven = dataclasses.replace(plan, schedule=(plan.schedule[0], plan.schedule[1][:2]))
    with pytest.raises(ShapeError, match=r"\[3, 2\]"):
        check_plan(uneven, 2)
    with pytest.raises(ShapeError, match="1 data-parallel"):
        check_plan(plan, 1)


@pytest.mark.parametrize("num_loss_tokens", [0, 5])
def test_a_denominator_that_is_not_the_sum_of_loss_tokens_is_refused(
    made: list[tuple[Sample, SampleRef]], num_loss_tokens: int
) -> None:
    plan = recorded.plan([ref for _, ref in made], 1)
    with pytest.raises(ShapeError, match="loss tokens"):
        check_plan(dataclasses.replace(plan, num_loss_tokens=num_loss_tokens), 1)


def test_a_minibatch_without_any_loss_token_is_refused() -> None:
    with pytest.raises(ShapeError, match="above 0"):
        check_plan(MinibatchPlan((((),),), 4, 0), 1)


def test_a_reference_to_another_sample_than_the_file_has_is_refused(
    made: list[tuple[Sample, SampleRef]],
) -> None:
    refs = [ref for _, ref in made]
    refs[0] = dataclasses.replace(refs[0], index=1)
    with pytest.raises(ShapeError, match="another run"):
        pack_minibatch(recorded.plan(refs, 1), 0, Multiples())
    refs[0] = dataclasses.replace(refs[0], path="/nowhere/g9.safetensors")
    with pytest.raises(DataError, match="no such group file"):
        pack_minibatch(recorded.plan(refs, 1), 0, Multiples())


def test_sequences_of_context_ranks_are_padded_and_every_token_is_on_one_rank(
    made: list[tuple[Sample, SampleRef]],
) -> None:
    plan = recorded.plan([ref for _, ref in made], 1)
    multiples = Multiples.of(LearnerMesh(tp=2, cp=2), tokens=8)
    packed, length = pack_minibatch(plan, 0, multiples)
    aligned = [sum(-(-ref.num_tokens // 4) * 4 for ref in refs) for refs in plan.schedule[0]]
    assert [len(each.tokens_T) for each in packed] == [-(-n // 8) * 8 for n in aligned]
    assert length == max(len(each.tokens_T) for each in packed)
    for microbatch in packed:
        assert (microbatch.cu_seqlens % 4 == 0).all()
        parts = [microbatch.part(2, rank) for rank in range(2)]
        for name in ("tokens_T", "positions_T", "loss_mask_T", "advantage_T"):
            halves = torch.cat([getattr(part, name) for part in parts])
            whole = getattr(microbatch, name)
            assert sorted(halves.tolist()) == sorted(whole.tolist())
        for part in parts:
            first = part.positions_T[: int(microbatch.cu_seqlens[1]) // 2]
            # Causal attention costs each rank the same: the r-th chunk and the r-th from the end.
            assert 2 * int(first.sum()) == int(microbatch.positions_T[: len(first) * 2].sum())


def test_microbatches_of_model_chunks_are_as_many_as_a_multiple_of_the_stages(
    made: list[tuple[Sample, SampleRef]],
) -> None:
    plan = recorded.plan([ref for _, ref in made], 1)
    multiples = Multiples.of(LearnerMesh(pp=2, vpp=2), tokens=1)
    packed, _ = pack_minibatch(plan, 0, multiples)
    assert [len(each.segments) for each in packed] == [2, 2, 3, 0]
    assert len(pack_sequences([((1,), (2, 3))], 8, 2, 1, multiples)[0]) == 2


def test_a_microbatch_beyond_what_the_plan_says_is_refused(
    made: list[tuple[Sample, SampleRef]],
) -> None:
    plan = recorded.plan([ref for _, ref in made], 1)
    with pytest.raises(ShapeError, match=r"36 tokens, where the plan says 35 at most"):
        check_plan(dataclasses.replace(plan, microbatch_tokens=35), 1)
