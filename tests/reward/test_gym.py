"""reasoning-gym's own scorers on the answer that a response gives."""

from __future__ import annotations

import pytest

from megarl.errors import RewardError
from megarl.reward.gym import extract_answer, make_gym_scorer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("12", "12"),
        (" 12\n", "12"),
        ("<answer>1</answer> no: <answer>\n12\n</answer>", "12"),
        (r"thus \boxed{12}", "12"),
    ],
)
def test_answer_is_the_tagged_the_boxed_or_the_whole_text(response: str, answer: str) -> None:
    assert extract_answer(response) == answer


@pytest.mark.parametrize("task", ["chain_sum", "letter_counting", "simple_equations"])
def test_gold_answer_scores_one_and_junk_scores_zero(task: str) -> None:
    import reasoning_gym

    entry = reasoning_gym.create_dataset(task, size=1, seed=3)[0]
    score = make_gym_scorer(task, {})
    assert score(f"<answer>{entry['answer']}</answer>", "", entry) == 1.0
    assert score("no idea", "", entry) == 0.0
    assert make_gym_scorer("", {})(entry["answer"], "", entry) == 1.0


def test_unknown_task_is_an_error_that_names_it() -> None:
    with pytest.raises(RewardError, match="'no_such_task'"):
        make_gym_scorer("no_such_task", {})
