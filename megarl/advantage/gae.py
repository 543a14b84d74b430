"""Stage d, PPO: advantages of single tokens, from rewards and a critic's values.

Owns generalized advantage estimation over one response. Pure; knows nothing of models, batches or
ranks. The learner calls it, which alone has the values.
"""

from __future__ import annotations

from collections.abc import Sequence


def generalized_advantages(
    rewards: Sequence[float],
    values: Sequence[float],
    last_value: float,
    gamma: float,
    gae_lambda: float,
) -> list[float]:
    """The advantage of each action of one response, in order.

    Action i is a token that the policy chose, in a state of value `values[i]`, and `rewards[i]` is
    what it was given at once; tokens that others inserted are part of the way to the next state.
    `last_value` is that of the state after the last action: 0 where the response has ended.

    Source: Schulman et al. 2016, "High-dimensional continuous control using generalized advantage
    estimation", eq. 16, summed from the end: A_i = delta_i + gamma * lambda * A_(i+1), with
    delta_i = r_i + gamma * V_(i+1) - V_i.

    >>> generalized_advantages([0.0, 1.0], [0.5, 0.5], 0.0, gamma=1.0, gae_lambda=1.0)
    [0.5, 0.5]
    >>> generalized_advantages([0.0, 1.0], [0.5, 0.5], 0.0, gamma=1.0, gae_lambda=0.0)
    [0.0, 0.5]
    """
    found: list[float] = []
    advantage, next_value = 0.0, last_value
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * next_value - value + gamma * gae_lambda * advantage
        next_value = value
        found.append(advantage)
    return found[::-1]
