"""The `exact` reward: the response is the answer, character by character. Knows nothing else."""

from __future__ import annotations

from collections.abc import Mapping


def score_exact(response: str, answer: str, facts: Mapping[str, object]) -> float:
    """1.0 where both texts are equal without the white space around them, else 0.0.

    >>> score_exact("046\\n", "046", {}), score_exact("46", "046", {})
    (1.0, 0.0)
    """
    return float(response.strip() == answer.strip())
