"""Settings of stage d: how a reward becomes the advantage of samples, or of their tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megarl.config.group import Group


class AdvantageConfig(Group):
    """Stage d."""

    estimator: Literal["grpo", "gae"] = "grpo"
    """`grpo`: reward minus the group's mean, over its deviation where `normalize_std`; `gae`:
    generalized advantage estimation, for each token, with the values of a critic (docs/ppo.md)."""
    normalize_std: bool = True
    """`grpo`: divide by the group's standard deviation (unbiased, plus 1e-6)."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """`gae`: discount of a reward for each token that it is ahead."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """`gae`: 1 takes the whole return less the value, 0 one token's reward and the next value."""
    whiten: bool = True
    """`gae`: take the mean over all loss tokens of the rollout batch off, and divide by their
    standard deviation (plus 1e-6)."""
    cut_responses: Literal["ended", "continued"] = "ended"
    """`gae`: a response that reached `rollout.sampling.max_new_tokens` has `ended`, nothing follows
    its reward; or it would have been `continued`, and the critic's value of its last state
    follows."""
