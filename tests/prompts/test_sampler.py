"""The cursor: every prompt once a pass, and a restored sampler continues the sequence."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import CheckpointError
from megarl.prompts.sampler import PromptSampler
from megarl.types import Prompt


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", (i,), str(i), "") for i in range(count)]


def names(drawn: list[Prompt]) -> list[str]:
    return [prompt.prompt_id for prompt in drawn]


@settings(max_examples=100)
@given(
    count=st.integers(1, 12),
    draws=st.lists(st.integers(0, 17), max_size=8),
    cut=st.integers(0, 8),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_sampler_restored_at_any_point_continues_the_same_sequence(
    count: int, draws: list[int], cut: int, seed: int, shuffle: bool
) -> None:
    whole = PromptSampler(prompts(count), seed, shuffle)
    expected = [names(whole.draw(n)) for n in draws]
    first = PromptSampler(prompts(count), seed, shuffle)
    found = [names(first.draw(n)) for n in draws[:cut]]
    state = json.loads(json.dumps(first.state()))
    second = PromptSampler(prompts(count), seed, shuffle)
    second.restore(state)
    assert second.state() == state
    assert found + [names(second.draw(n)) for n in draws[cut:]] == expected


@settings(max_examples=50)
@given(st.integers(1, 12), st.lists(st.integers(0, 9), max_size=12))
def test_no_prompt_comes_twice_within_a_pass(count: int, draws: list[int]) -> None:
    sampler = PromptSampler(prompts(count), seed=5)
    sequence = [name for n in draws for name in names(sampler.draw(n))]
    for start in range(0, len(sequence), count):
        one_pass = sequence[start : start + count]
        assert len(set(one_pass)) == len(one_pass)


def test_passes_and_seeds_have_orders_of_their_own() -> None:
    sampler = PromptSampler(prompts(20), seed=0)
    first, second = names(sampler.draw(20)), names(sampler.draw(20))
    assert first != second and sorted(first) == sorted(second)
    assert names(PromptSampler(prompts(20), seed=1).draw(20)) != first


def test_without_shuffling_prompts_come_in_file_order() -> None:
    sampler = PromptSampler(prompts(3), seed=0, shuffle=False)
    assert names(sampler.draw(5)) == ["p0", "p1", "p2", "p0", "p1"]


def test_cursor_of_other_prompts_or_another_seed_is_refused() -> None:
    state = PromptSampler(prompts(3), seed=0).state()
    with pytest.raises(CheckpointError, match="num_prompts = 3, this run has 4"):
        PromptSampler(prompts(4), seed=0).restore(state)
    with pytest.raises(CheckpointError, match="seed = 0, this run has 1"):
        PromptSampler(prompts(3), seed=1).restore(state)
    changed = [*prompts(2), Prompt("p2", (7,), "", "")]
    with pytest.raises(CheckpointError, match="digest"):
        PromptSampler(changed, seed=0).restore(state)


def test_cursor_holds_on_another_day_whose_name_the_chat_template_writes() -> None:
    sampler = PromptSampler(prompts(3), seed=0)
    sampler.draw(2)
    other = [replace(prompt, prompt_ids=(9, *prompt.prompt_ids)) for prompt in prompts(3)]
    restored = PromptSampler(other, seed=0)
    restored.restore(sampler.state())
    assert names(restored.draw(5)) == names(sampler.draw(5))


def test_broken_cursor_is_refused() -> None:
    sampler = PromptSampler(prompts(3), seed=0)
    with pytest.raises(CheckpointError, match="broken"):
        sampler.restore({**sampler.state(), "position": 9})
