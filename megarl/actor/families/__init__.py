"""The model families that megarl computes, one module each, as data."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.actor.families.family import Family
from megarl.actor.families.llama import LLAMA
from megarl.actor.families.qwen2 import QWEN2
from megarl.actor.families.qwen3 import QWEN3

FAMILIES: Mapping[str, Family] = {family.architecture: family for family in (LLAMA, QWEN2, QWEN3)}
"""By their `architectures` entry in a Hugging Face config.json."""
