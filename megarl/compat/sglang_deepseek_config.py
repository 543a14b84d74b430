"""Fields that SGLang reads of a DeepSeek-V3 config.json and transformers does not write.

Owns their values where a config.json has none: those of every published model of the family, which
transformers' own class takes for granted. A checkpoint that transformers saved lacks them, and a
server of it ends with "'DeepseekV3Config' object has no attribute 'moe_layer_freq'".

For: sglang 0.5.23 with transformers 5.19. Ends when either of the two gives the fields a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.compat.after_import import after_import

MODULE = "transformers.models.deepseek_v3.configuration_deepseek_v3"

FIELDS: Mapping[str, object] = {
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "ep_size": 1,
}


def install() -> None:
    """Give the class the fields once it is imported; what a config.json says goes before."""
    after_import(MODULE, _complete)


def _complete(module: Any) -> None:
    for name, value in FIELDS.items():
        if not hasattr(module.DeepseekV3Config, name):
            setattr(module.DeepseekV3Config, name, value)
