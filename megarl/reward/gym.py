r"""The `reasoning_gym` reward: the task's own scorer on the answer found in the response.

Imports reasoning-gym only when a scorer is made. Knows nothing of processes or groups.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from megarl.errors import RewardError
from megarl.reward.math import last_boxed

_TAGGED = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)

ScoreFunction = Callable[[str, str, Mapping[str, object]], float]


def make_gym_scorer(task: str, task_args: Mapping[str, object]) -> ScoreFunction:
    """A score function for entries of `task`, made with `task_args`.

    An entry of another task (its `metadata.source_dataset` says which) is scored by that one with
    its defaults. Raises RewardError where the package or the task is missing.
    """
    try:
        import reasoning_gym  # seconds to import
    except ImportError as error:
        raise RewardError(
            "reward.kind = 'reasoning_gym' needs the package reasoning-gym; pip install "
            "reasoning-gym"
        ) from error
    scorers: dict[str, Callable[..., float]] = {}
    if task:
        try:
            dataset = reasoning_gym.create_dataset(task, **{"size": 1, "seed": 0, **task_args})
        except (ValueError, TypeError, AssertionError) as error:
            raise RewardError(
                f"reasoning-gym task {task!r} with {dict(task_args)}: {error}"
            ) from error
        scorers[task] = dataset.score_answer

    def score(response: str, answer: str, facts: Mapping[str, object]) -> float:
        metadata = facts.get("metadata")
        source = metadata.get("source_dataset", task) if isinstance(metadata, Mapping) else task
        if source not in scorers:
            scorers[source] = reasoning_gym.get_score_answer_fn(source)
        return float(scorers[source](answer=extract_answer(response), entry=dict(facts)))

    return score


def extract_answer(response: str) -> str:
    r"""What a response gives as its answer: the last <answer> tag, else \boxed{}, else all of it.

    >>> extract_answer("I think <answer> 12 </answer>."), extract_answer(" 12\n")
    ('12', '12')
    """
    tagged = _TAGGED.findall(response)
    if tagged:
        return str(tagged[-1])
    boxed = last_boxed(response)
    return (boxed if boxed is not None else response).strip()
