"""Advantages of tokens against the published sum, written out."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.advantage.gae import generalized_advantages

NUMBERS = st.floats(-10, 10)
SHARES = st.floats(0, 1)


@st.composite
def responses(draw: st.DrawFn) -> tuple[list[float], list[float], float]:
    """(rewards, values, value of the last state) of a response of 1 to 12 actions."""
    length = draw(st.integers(1, 12))
    row = st.lists(NUMBERS, min_size=length, max_size=length)
    return draw(row), draw(row), draw(NUMBERS)


def published(
    rewards: list[float], values: list[float], last_value: float, gamma: float, gae_lambda: float
) -> list[float]:
    """Schulman et al. 2016, eq. 16, each advantage a sum of its own over the deltas of eq. 9."""
    states = [*values, last_value]
    deltas = [rewards[t] + gamma * states[t + 1] - states[t] for t in range(len(rewards))]
    return [
        math.fsum((gamma * gae_lambda) ** k * delta for k, delta in enumerate(deltas[t:]))
        for t in range(len(rewards))
    ]


@given(responses(), SHARES, SHARES)
def test_advantages_are_the_published_sum(
    response: tuple[list[float], list[float], float], gamma: float, gae_lambda: float
) -> None:
    found = generalized_advantages(*response, gamma, gae_lambda)
    assert found == pytest.approx(published(*response, gamma, gae_lambda), rel=1e-9, abs=1e-9)


@given(responses(), SHARES)
def test_lambda_of_one_is_the_discounted_return_less_the_value(
    response: tuple[list[float], list[float], float], gamma: float
) -> None:
    rewards, values, last_value = response
    ahead = [*rewards, last_value]
    expected = [
        math.fsum(gamma**k * reward for k, reward in enumerate(ahead[t:])) - value
        for t, value in enumerate(values)
    ]
    assert generalized_advantages(*response, gamma, 1.0) == pytest.approx(expected, abs=1e-9)


def test_ended_response_takes_nothing_from_beyond_its_end_and_a_cut_one_does() -> None:
    ended = generalized_advantages([0.0, 0.5], [0.25, 0.125], 0.0, 1.0, 0.5)
    cut = generalized_advantages([0.0, 0.5], [0.25, 0.125], 2.0, 1.0, 0.5)
    assert ended == [-0.125 + 0.5 * 0.375, 0.375]
    assert cut == [-0.125 + 0.5 * 2.375, 2.375]


def test_rewards_and_values_of_two_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="argument 2"):
        generalized_advantages([1.0], [1.0, 2.0], 0.0, 1.0, 1.0)


def test_response_without_an_action_has_no_advantage() -> None:
    assert generalized_advantages([], [], 3.0, 1.0, 1.0) == []
