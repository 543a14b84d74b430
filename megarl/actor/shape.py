"""The shape of the policy, read from a Hugging Face config.json, strictly.

Owns the meaning of every config field: honoured, known not to matter, or refused. Knows nothing of
weights, parallelism or engines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.actor.families import FAMILIES
from megarl.actor.families.family import Family
from megarl.errors import ModelError

# Constants of Megatron's RotaryEmbedding._apply_scaling, megatron-core 0.19; the factor is free.
LLAMA3_LOW_FREQ_FACTOR = 1.0
LLAMA3_HIGH_FREQ_FACTOR = 4.0
LLAMA3_ORIGINAL_MAX_POSITIONS = 8192

# Fields that change neither the forward pass nor the parameters of the families here.
HARMLESS = frozenset(
    "_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures "
    "bos_token_id chunk_size_feed_forward dtype eos_token_id id2label initializer_range "
    "is_decoder is_encoder_decoder is_llama_config label2id model_type "
    "output_attentions output_hidden_states pad_token_id pretraining_tp problem_type return_dict "
    "task_specific_params tokenizer_class torch_dtype transformers.js_config "
    "transformers_version unsloth_fixed unsloth_version use_cache".split()
)

# Fields that read_shape turns into the shape.
HONOURED = frozenset(
    "head_dim hidden_size intermediate_size max_position_embeddings num_attention_heads "
    "num_hidden_layers num_key_value_heads rms_norm_eps rope_parameters rope_scaling rope_theta "
    "tie_word_embeddings vocab_size".split()
)


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3's frequency scaling of rotary embeddings: long wavelengths are divided by `factor`.

    Its other constants are Megatron's: low 1, high 4, original length 8192.
    """

    factor: float


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2): queries, keys and values through low ranks.

    `q_lora_rank` is None where queries are projected at full rank.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """The routed experts of the layers that have them. `shared_intermediate_size` 0 is none.

    `router_bias` is the per-expert correction of DeepSeek-V3 (e_score_correction_bias). The other
    fields say how the router chooses.
    """

    num_experts: int
    experts_per_token: int
    expert_intermediate_size: int
    shared_intermediate_size: int
    router_bias: bool
    scoring: str
    normalize: bool
    scaling: float
    num_groups: int
    groups_per_token: int
    dense_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything that the engines and the layouts need to know about the policy but its weights."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | None
    max_positions: int
    rotary_fraction: float = 1.0
    attention_output_gate: bool = False
    mla: LatentAttention | None = None
    moe: MixtureOfExperts | None = None
    num_mtp_layers: int = 0
    fp8_block: tuple[int, int] | None = None

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """For each decoder layer, "dense" or "moe"."""
        if self.moe is None:
            return ("dense",) * self.num_layers
        dense = self.moe.dense_layers
        return tuple("dense" if i in dense else "moe" for i in range(self.num_layers))

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> ModelShape:
        """The inverse of `to_dict`."""
        rope = values["rope_scaling"]
        scaling = Llama3Rope(**rope) if isinstance(rope, Mapping) else None
        return cls(**{**values, "rope_scaling": scaling})  # type: ignore[arg-type]


def read_shape(model_dir: str | Path) -> ModelShape:
    """The shape of the checkpoint in folder `model_dir`.

    Raises ModelError where the folder or its config.json is missing or broken, where the
    architecture is none of `FAMILIES`, and where a field changes the mathematics in a way that is
    not computed.
    """
    path = Path(model_dir) / "config.json"
    config = _read_json(path, required=True)
    return _Reader(path, config, _family(path, config)).shape()


def eos_token_ids(model_dir: str | Path) -> tuple[int, ...]:
    """Tokens that end a response: of generation_config.json, else of config.json; may be empty.

    Raises ModelError where a file is broken or config.json is missing.
    """
    folder = Path(model_dir)
    for name, required in (("generation_config.json", False), ("config.json", True)):
        found = _read_json(folder / name, required).get("eos_token_id")
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ModelError(
                f"{folder / name}: eos_token_id is {found!r}; give a token id, or a list of them"
            )
        return tuple(ids)
    return ()


def _read_json(path: Path, required: bool) -> dict[str, object]:
    """The object in a JSON file; {} where it is missing and not required."""
    if not path.parent.is_dir():
        raise ModelError(
            f"model folder {path.parent} does not exist; set actor.model to the folder of a "
            "Hugging Face checkpoint"
        )
    if not path.is_file():
        if not required:
            return {}
        raise ModelError(
            f"{path.parent} has no {path.name}; set actor.model to the folder of a Hugging Face "
            "checkpoint"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}; fetch the file again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}; it must be a JSON object")
    return value


def _family(path: Path, config: Mapping[str, object]) -> Family:
    """The family that the config's one architecture names."""
    known = ", ".join(FAMILIES)
    found = config.get("architectures")
    if not isinstance(found, list) or len(found) != 1 or not isinstance(found[0], str):
        raise ModelError(f"{path}: architectures is {found!r}; it must name one of {known}")
    if found[0] not in FAMILIES:
        raise ModelError(f"{path}: architecture {found[0]} is not supported; use one of {known}")
    family = FAMILIES[found[0]]
    model_type = config.get("model_type", family.model_types[0])
    if model_type not in family.model_types:
        raise ModelError(
            f"{path}: model_type is {model_type!r} beside architecture {family.architecture}; "
            f"engines choose by one or the other, so it must be {family.model_types[0]!r}"
        )
    return family


class _Reader:
    """One config.json being read; every error names the file, the field and the value."""

    def __init__(self, path: Path, config: Mapping[str, object], family: Family) -> None:
        self.path, self.config, self.family = path, config, family

    def shape(self) -> ModelShape:
        """The shape, after every field of the config has been accounted for."""
        self._check_fields()
        heads, hidden = self._size("num_attention_heads"), self._size("hidden_size")
        kv_heads, head_dim = self._kv_heads(heads), self._head_dim(heads, hidden)
        if heads % kv_heads:
            raise self._refusal(
                "num_key_value_heads", f"it must divide num_attention_heads = {heads}"
            )
        if head_dim % 2:
            raise self._refusal("head_dim", "rotary embeddings need an even number")
        theta, scaling = self._rope()
        return ModelShape(
            architecture=self.family.architecture,
            num_layers=self._size("num_hidden_layers"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=self._size("intermediate_size"),
            vocab_size=self._size("vocab_size"),
            tie_embeddings=self._flag("tie_word_embeddings"),
            qkv_bias=self.family.qkv_bias is True,
            qk_norm=self.family.qk_norm is True,
            rms_norm_eps=self._real("rms_norm_eps", self.config),
            rope_theta=theta,
            rope_scaling=scaling,
            max_positions=self._size("max_position_embeddings"),
        )

    def _refusal(self, field: str, reason: str, value: object = ...) -> ModelError:
        found = self.config.get(field) if value is ... else value
        return ModelError(f"{self.path}: {field} is {found!r}; {reason}")

    def _check_fields(self) -> None:
        """Refuse what changes the mathematics, and what nobody here knows the meaning of."""
        for field, value in self.config.items():
            if value is None or field in HARMLESS | HONOURED | self.family.harmless:
                continue
            if field not in self.family.fixed:
                raise self._refusal(
                    field,
                    f"megarl does not know this field of {self.family.architecture} and may not "
                    "compute what it asks for; remove it if it does not change the forward pass",
                )
            allowed = self.family.fixed[field]
            values = value if isinstance(value, list) and value else [value]
            if not all(_is_one_of(v, allowed) for v in values):
                shown = " or ".join(repr(v) for v in allowed[:1])
                raise self._refusal(field, f"only {shown} is computed alike by both engines")

    def _size(self, field: str) -> int:
        value = self.config.get(field)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self._refusal(field, "a positive integer is needed")
        return value

    def _flag(self, field: str) -> bool:
        value = self.config.get(field, False)  # the default of all three families
        if not isinstance(value, bool):
            raise self._refusal(field, "true or false is needed")
        return value

    def _real(self, field: str, values: Mapping[str, object]) -> float:
        value = values.get(field.rpartition(".")[2])
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self._refusal(field, "a positive number is needed", value)
        return float(value)

    def _kv_heads(self, heads: int) -> int:
        if self.config.get("num_key_value_heads") is None and self.family.kv_heads == "heads":
            return heads
        return self._size("num_key_value_heads")

    def _head_dim(self, heads: int, hidden: int) -> int:
        if self.config.get("head_dim") is not None:
            return self._size("head_dim")
        if self.family.head_dim != "derived":
            return self.family.head_dim
        if hidden % heads:
            raise self._refusal("hidden_size", f"without head_dim, {heads} heads must divide it")
        return hidden // heads

    def _rope(self) -> tuple[float, Llama3Rope | None]:
        """(theta, scaling) of transformers 5's rope_parameters, or of the older pair of fields."""
        parameters, scaling = (
            self.config.get(field) for field in ("rope_parameters", "rope_scaling")
        )
        field = "rope_parameters" if parameters is not None else "rope_scaling"
        merged = dict(self._rope_object(field, parameters if parameters is not None else scaling))
        if parameters is not None and scaling is not None:
            older = dict(self._rope_object("rope_scaling", scaling))
            if any(merged.get(key) != value for key, value in older.items()):
                raise self._refusal("rope_scaling", "it contradicts rope_parameters; keep one")
        top = self.config.get("rope_theta")
        if top is not None and merged.setdefault("rope_theta", top) != top:
            raise self._refusal("rope_theta", f"it contradicts {field}; keep one")
        theta = self._real("rope_theta", merged)
        return theta, self._rope_scaling(field, merged)

    def _rope_object(self, field: str, value: object) -> Mapping[str, object]:
        if value is None:
            return {}
        if not isinstance(value, dict) or any(isinstance(v, dict) for v in value.values()):
            raise self._refusal(field, "one object for all layers is needed")
        return {
            "rope_type" if key == "type" else key: v for key, v in value.items() if v is not None
        }

    def _rope_scaling(self, field: str, rope: Mapping[str, object]) -> Llama3Rope | None:
        kind = rope.get("rope_type", "default")
        fixed: dict[str, float] = {"partial_rotary_factor": 1.0}
        free = {"rope_type", "rope_theta"}
        if kind == "llama3":
            free.add("factor")
            fixed["low_freq_factor"] = LLAMA3_LOW_FREQ_FACTOR
            fixed["high_freq_factor"] = LLAMA3_HIGH_FREQ_FACTOR
            fixed["original_max_position_embeddings"] = LLAMA3_ORIGINAL_MAX_POSITIONS
        elif kind != "default":
            raise self._refusal(
                field, f"rope_type {kind!r} is not supported; 'default' and 'llama3' are"
            )
        for key, value in rope.items():
            if key not in free and (key not in fixed or value != fixed[key]):
                need = f"must be {fixed[key]:g}" if key in fixed else f"is unknown to {kind!r}"
                raise self._refusal(f"{field}.{key}", f"it {need}", value)
        if kind == "default":
            return None
        for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            if key not in rope:
                raise self._refusal(f"{field}.{key}", f"it must be {fixed[key]:g}", None)
        return Llama3Rope(self._real(f"{field}.factor", rope))


def _is_one_of(value: object, allowed: tuple[object, ...]) -> bool:
    """Membership that does not take 0 for False."""
    return any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed)
