"""The model families that megarl knows, one module each, as data."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.actor.families.deepseek_v3 import DEEPSEEK_V3
from megarl.actor.families.family import Family
from megarl.actor.families.glm4_moe import GLM4_MOE
from megarl.actor.families.llama import LLAMA
from megarl.actor.families.qwen2 import QWEN2
from megarl.actor.families.qwen3 import QWEN3
from megarl.actor.families.qwen3_moe import QWEN3_MOE

FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (LLAMA, QWEN2, QWEN3, QWEN3_MOE, DEEPSEEK_V3, GLM4_MOE)
}
"""By their `architectures` entry in a Hugging Face config.json."""
