"""Rotary embeddings of a config.json: transformers 5's rope_parameters, or the older fields.

Owns which scalings are read and what their constants must be. The families say which of them each
may have.
"""

from __future__ import annotations

from collections.abc import Mapping

from megarl.actor.config_fields import Fields
from megarl.actor.families.family import Family
from megarl.actor.model_shape import Llama3Rope, Yarn

# Constants of Megatron's RotaryEmbedding._apply_scaling, megatron-core 0.19; the factor is free.
LLAMA3_LOW_FREQ_FACTOR = 1.0
LLAMA3_HIGH_FREQ_FACTOR = 4.0
LLAMA3_ORIGINAL_MAX_POSITIONS = 8192

# What an absent beta means to transformers 5, megatron-core 0.19 and SGLang 0.5 alike.
YARN_BETA_FAST = 32.0
YARN_BETA_SLOW = 1.0

# Fields of every scaling; then those of each, with the value where it must have one.
BESIDE = ("partial_rotary_factor", "rope_theta", "rope_type")
KNOWN: Mapping[str, Mapping[str, float | None]] = {
    "default": {},
    "llama3": {
        "factor": None,
        "low_freq_factor": LLAMA3_LOW_FREQ_FACTOR,
        "high_freq_factor": LLAMA3_HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": LLAMA3_ORIGINAL_MAX_POSITIONS,
    },
    "yarn": dict.fromkeys(
        "factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim".split()
    ),
}


def read_rope(fields: Fields, family: Family) -> tuple[float, Llama3Rope | Yarn | None, float]:
    """(theta, scaling, fraction of a head that is rotated). Raises ModelError."""
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    rope = Fields(fields.path, _object(fields, name), f"{name}.")
    if name == "rope_parameters" and fields.has("rope_scaling"):
        older = _object(fields, "rope_scaling")
        if any(rope.values.get(key) != value for key, value in older.items()):
            raise fields.refusal("rope_scaling", "it contradicts rope_parameters; keep one")
    theta = _owner(fields, rope, "rope_theta").real("rope_theta")
    return theta, _scaling(fields, rope, name, family), _fraction(fields, rope, family)


def _owner(fields: Fields, rope: Fields, key: str) -> Fields:
    """Which of the two objects has the field: the config itself where both or none do."""
    if not fields.has(key):
        return rope if rope.has(key) else fields
    if rope.has(key) and rope.values[key] != fields.values[key]:
        raise fields.refusal(key, f"it contradicts {rope.within[:-1]}; keep one")
    return fields


def _object(fields: Fields, name: str) -> Mapping[str, object]:
    value = fields.values.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict) or any(isinstance(v, dict) for v in value.values()):
        raise fields.refusal(name, "one object for all layers is needed")
    found = {key: each for key, each in value.items() if each is not None}
    older = found.pop("type", None)
    if older is not None and found.setdefault("rope_type", older) != older:
        raise fields.refusal(name, "type contradicts rope_type; keep one")
    return found


def _fraction(fields: Fields, rope: Fields, family: Family) -> float:
    """The part of a head that is rotated: free in some families, the whole in the others."""
    key = "partial_rotary_factor"
    if family.rotary_fraction is None:
        if rope.values.get(key, 1.0) != 1.0:
            raise rope.refusal(key, "it must be 1")
        return 1.0
    owner = _owner(fields, rope, key)
    fraction = owner.real(key, family.rotary_fraction)
    if fraction > 1:
        raise owner.refusal(key, "it can be 1 at most")
    return fraction


def _scaling(fields: Fields, rope: Fields, name: str, family: Family) -> Llama3Rope | Yarn | None:
    kind = rope.values.get("rope_type", "default")
    if kind not in family.ropes:
        known = " and ".join(repr(one) for one in family.ropes)
        verb = "are" if len(family.ropes) > 1 else "is"
        raise fields.refusal(name, f"rope_type {kind!r} is not supported; {known} {verb}")
    constants = KNOWN[str(kind)]
    for key in rope.values:
        if key not in constants and key not in BESIDE:
            raise rope.refusal(key, f"it is unknown to {kind!r}")
    for key, constant in constants.items():
        if constant is not None and rope.values.get(key) != constant:
            raise rope.refusal(key, f"it must be {constant:g}")
    if kind == "llama3":
        return Llama3Rope(rope.real("factor"))
    if kind == "yarn":
        return Yarn(
            factor=rope.real("factor"),
            original_max_positions=rope.size("original_max_position_embeddings"),
            beta_fast=rope.real("beta_fast", YARN_BETA_FAST),
            beta_slow=rope.real("beta_slow", YARN_BETA_SLOW),
            mscale=rope.real("mscale"),
            mscale_all_dim=rope.real("mscale_all_dim"),
        )
    return None
