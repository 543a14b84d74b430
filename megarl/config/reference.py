"""Settings of the reference, the frozen policy of the KL term."""

from __future__ import annotations

from typing import Literal

from megarl.config.group import Group


class ReferenceConfig(Group):
    """The frozen policy that the KL term is a distance to, where `kl.coef` is above 0. It is in
    host memory, and takes the policy's place on the device while it scores."""

    model: str = ""
    """Folder of its Hugging Face checkpoint, of the policy's shape. Empty means `actor.model`, as
    the run began. Relative as `actor.model` is."""
    storage: Literal["policy", "fp8"] = "policy"
    """What it is kept as. `policy`: as `learner.precision.params`; `fp8`: matrices of decoder
    layers in float8 (e4m3) in blocks of 128 x 128 with a float32 scale each: about half of the host
    memory of bf16. The largest relative error is logged."""
