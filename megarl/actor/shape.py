"""The shape of the policy, read from a Hugging Face config.json, strictly.

Owns the meaning of every config field: honoured, known not to matter, or refused. Of the
weights it knows names and shapes only; nothing of parallelism or engines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from megarl.actor.config_fields import MAX_SIZE, Fields, is_integer, is_one_of, read_json, shown
from megarl.actor.config_rope import read_rope
from megarl.actor.families import FAMILIES
from megarl.actor.families.family import Family
from megarl.actor.model_shape import (
    LatentAttention,
    Llama3Rope,
    MixtureOfExperts,
    ModelShape,
    Yarn,
)
from megarl.actor.parameters import FIXED_BYTES, block_table
from megarl.errors import ModelError

__all__ = [
    "LatentAttention",
    "Llama3Rope",
    "MixtureOfExperts",
    "ModelShape",
    "Yarn",
    "eos_token_ids",
    "read_shape",
]

# Fields that change neither the forward pass nor the parameters of the families here.
HARMLESS = frozenset(
    "_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures "
    "bos_token_id chunk_size_feed_forward dtype eos_token_id id2label initializer_range "
    "is_decoder is_encoder_decoder is_llama_config label2id model_type "
    "output_attentions output_hidden_states pad_token_id pretraining_tp problem_type return_dict "
    "task_specific_params tokenizer_class torch_dtype transformers.js_config "
    "transformers_version unsloth_fixed unsloth_version use_cache".split()
)

# Fields that read_shape turns into the shape, of every family and by what a family has.
HONOURED = frozenset(
    "head_dim hidden_size intermediate_size max_position_embeddings num_attention_heads "
    "num_hidden_layers num_key_value_heads quantization_config rms_norm_eps rope_parameters "
    "rope_scaling rope_theta tie_word_embeddings vocab_size".split()
)
HONOURED_BY: Mapping[str, frozenset[str]] = {
    "grouped": frozenset(),
    "latent": frozenset(
        "kv_lora_rank q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim".split()
    ),
    "none": frozenset(),
    "qwen3": frozenset(
        "decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts "
        "num_experts_per_tok num_local_experts".split()
    ),
    "deepseek": frozenset(
        "first_k_dense_replace moe_intermediate_size n_group n_routed_experts n_shared_experts "
        "norm_topk_prob num_experts_per_tok num_nextn_predict_layers routed_scaling_factor "
        "topk_group".split()
    ),
}

# The one quantization that is read: float8 in blocks, one float32 scale each. A scale_fmt would
# round the scales, which is another quantization.
FP8 = {"quant_method": ("fp8",), "fmt": ("e4m3",), "activation_scheme": ("dynamic",)}


# Far above any model of today, and small enough that counts fit 64 bits and a plan a machine.
MAX_LAYERS = 10_000
MAX_EXPERTS = 100_000
MAX_HEADS = 2**16
MAX_PARAMETER_BYTES = 2**40  # in float32; the experts of a layer are one parameter
MAX_BYTES = 2**50  # of all parameters, in float32


def read_shape(model_dir: str | Path) -> ModelShape:
    """The shape of the checkpoint in folder `model_dir`.

    Raises ModelError where the folder or its config.json is missing or broken, where the
    architecture is none of `FAMILIES`, where a field changes the mathematics in a way that is
    not computed, and where a size is beyond all that is counted here.
    """
    path = Path(model_dir) / "config.json"
    config = read_json(path, required=True)
    family = _family(path, config)
    fields = Fields(path, config)
    _check_fields(fields, family)
    shape = _shape(fields, family)
    _check_bytes(path, shape)
    return shape


def eos_token_ids(model_dir: str | Path) -> tuple[int, ...]:
    """Tokens that end a response: of generation_config.json, else of config.json; may be empty.

    Raises ModelError where a file is broken or config.json is missing.
    """
    folder = Path(model_dir)
    for name, required in (("generation_config.json", False), ("config.json", True)):
        found = read_json(folder / name, required).get("eos_token_id")
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not all(is_integer(i) for i in ids):
            raise ModelError(
                f"{folder / name}: eos_token_id is {shown(found)}; give a token id, or a list of "
                "them"
            )
        return tuple(ids)
    return ()


def _family(path: Path, config: Mapping[str, object]) -> Family:
    """The family that the config's one architecture names."""
    known = ", ".join(FAMILIES)
    found = config.get("architectures")
    if not isinstance(found, list) or len(found) != 1 or not isinstance(found[0], str):
        raise ModelError(f"{path}: architectures is {shown(found)}; it must name one of {known}")
    if found[0] not in FAMILIES:
        raise ModelError(
            f"{path}: architecture {shown(found[0])[1:-1]} is not supported; use one of {known}"
        )
    family = FAMILIES[found[0]]
    model_type = config.get("model_type", family.model_types[0])
    if model_type not in family.model_types:
        raise ModelError(
            f"{path}: model_type is {shown(model_type)} beside architecture {family.architecture}; "
            "engines choose by one or the other, so it must be "
            + " or ".join(repr(known) for known in family.model_types)
        )
    return family


def _check_fields(fields: Fields, family: Family) -> None:
    """Refuse what changes the mathematics, and what nobody here knows the meaning of."""
    honoured = HONOURED | HONOURED_BY[family.attention] | HONOURED_BY[family.experts]
    honoured |= {name for name in (family.qkv_bias, family.qk_norm) if isinstance(name, str)}
    if family.rotary_fraction is not None:
        honoured |= {"partial_rotary_factor"}
    for field, value in fields.values.items():
        if field in HARMLESS | honoured | family.harmless:
            continue
        if field not in family.fixed:
            raise fields.refusal(
                field,
                f"megarl does not know this field of {family.architecture} and may not "
                "compute what it asks for; remove it if it does not change the forward pass",
            )
        allowed = family.fixed[field]
        values = value if isinstance(value, list) and value else [value]
        if not all(is_one_of(v, allowed) for v in values):
            raise fields.refusal(field, f"only {allowed[0]!r} is computed alike by both engines")


def _shape(fields: Fields, family: Family) -> ModelShape:
    """The shape, once every field of the config has been accounted for."""
    layers = fields.size("num_hidden_layers", MAX_LAYERS)
    heads = fields.size("num_attention_heads", MAX_HEADS)
    mla = _latent_attention(fields) if family.attention == "latent" else None
    kv_heads, head_dim = _heads(fields, family, heads, mla)
    theta, scaling, fraction = read_rope(fields, family)
    if head_dim * fraction % 2:
        raise fields.refusal("head_dim", "rotary embeddings need an even number", head_dim)
    return ModelShape(
        architecture=family.architecture,
        num_layers=layers,
        hidden_size=fields.size("hidden_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.size("intermediate_size"),
        vocab_size=fields.size("vocab_size"),
        tie_embeddings=fields.flag("tie_word_embeddings"),  # false is the default of all families
        qkv_bias=_has(fields, family.qkv_bias),
        qk_norm=_has(fields, family.qk_norm),
        rms_norm_eps=fields.real("rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=fields.size("max_position_embeddings"),
        rotary_fraction=fraction,
        mla=mla,
        moe=_experts(fields, family, layers),
        num_mtp_layers=_mtp_layers(fields, family),
        fp8_block=_fp8_block(fields, family),
    )


def _check_bytes(path: Path, shape: ModelShape) -> None:
    """Refuse what is too large although each size is not: a parameter, or all of them."""
    table, total = block_table(shape), 0
    for kind, parameters in table.kinds.items():
        times = sum(block.kind == kind for block in table.blocks)
        for parameter in parameters:
            size = parameter.num_elements * FIXED_BYTES["float32"]
            total += size * times
            if size > MAX_PARAMETER_BYTES:
                raise ModelError(
                    f"{path}: {parameter.name} of shape {list(parameter.shape)} has {size} bytes "
                    f"in float32; it can have {MAX_PARAMETER_BYTES} at most, so make a size smaller"
                )
    if total > MAX_BYTES:
        raise ModelError(
            f"{path}: the model has {total} bytes in float32; it can have {MAX_BYTES} at most, so "
            "make num_hidden_layers or another size smaller"
        )


def _has(fields: Fields, rule: bool | str) -> bool:
    """Whether a family has something: always, never, or where a field says so."""
    return fields.flag(rule) if isinstance(rule, str) else rule


def _heads(
    fields: Fields, family: Family, heads: int, mla: LatentAttention | None
) -> tuple[int, int]:
    """(kv heads, width of a head)."""
    if not fields.has("num_key_value_heads") and family.kv_heads == "heads":
        kv_heads = heads
    else:
        kv_heads = fields.size("num_key_value_heads")
    if mla is not None:
        if kv_heads != heads:
            raise fields.refusal(
                "num_key_value_heads", f"latent attention has one for each of {heads} heads"
            )
        return kv_heads, mla.qk_nope_head_dim + mla.qk_rope_head_dim
    if heads % kv_heads:
        raise fields.refusal("num_key_value_heads", f"it must divide num_attention_heads = {heads}")
    hidden = fields.size("hidden_size")
    if fields.has("head_dim"):
        return kv_heads, fields.size("head_dim")
    if family.head_dim != "derived":
        return kv_heads, family.head_dim
    if hidden % heads:
        raise fields.refusal("hidden_size", f"without head_dim, {heads} heads must divide it")
    return kv_heads, hidden // heads


def _latent_attention(fields: Fields) -> LatentAttention:
    """The low ranks and the widths; the widths that transformers repeats must agree."""
    mla = LatentAttention(
        q_lora_rank=fields.size("q_lora_rank") if fields.has("q_lora_rank") else None,
        kv_lora_rank=fields.size("kv_lora_rank"),
        qk_nope_head_dim=fields.size("qk_nope_head_dim"),
        qk_rope_head_dim=fields.size("qk_rope_head_dim"),
        v_head_dim=fields.size("v_head_dim"),
    )
    if mla.qk_rope_head_dim % 2:
        raise fields.refusal("qk_rope_head_dim", "rotary embeddings need an even number")
    repeated = {
        "head_dim": mla.qk_rope_head_dim,  # transformers' DeepseekV3Config
        "qk_head_dim": mla.qk_nope_head_dim + mla.qk_rope_head_dim,
    }
    for field, width in repeated.items():
        if fields.has(field) and fields.size(field) != width:
            raise fields.refusal(field, f"beside the other widths it must be {width}")
    return mla


def _experts(fields: Fields, family: Family, layers: int) -> MixtureOfExperts | None:
    """The routed experts, in the words of the family's config."""
    match family.experts:
        case "none":
            return None
        case "qwen3":
            moe = _qwen3_experts(fields, layers)
        case "deepseek":
            moe = _deepseek_experts(fields, layers)
    chosen, groups = moe.experts_per_token, moe.num_groups
    if chosen > moe.num_experts:
        raise fields.refusal("num_experts_per_tok", f"there are only {moe.num_experts} experts")
    if moe.num_experts % groups:
        raise fields.refusal("n_group", f"it must divide the {moe.num_experts} experts")
    if moe.groups_per_token > groups:
        raise fields.refusal("topk_group", f"there are only {groups} groups")
    return moe


def _qwen3_experts(fields: Fields, layers: int) -> MixtureOfExperts:
    # transformers 5 writes num_experts as num_local_experts.
    older, newer = "num_experts", "num_local_experts"
    if fields.has(older) and fields.has(newer) and fields.values[older] != fields.values[newer]:
        raise fields.refusal(newer, f"it contradicts {older}; keep one")
    step = fields.size("decoder_sparse_step") if fields.has("decoder_sparse_step") else 1
    only = fields.values.get("mlp_only_layers", [])
    if not isinstance(only, list) or not all(is_integer(i) and 0 <= i < layers for i in only):
        raise fields.refusal("mlp_only_layers", f"numbers of the {layers} layers are needed")
    without = frozenset(only)
    return MixtureOfExperts(
        num_experts=fields.size(newer if fields.has(newer) else older, MAX_EXPERTS),
        experts_per_token=fields.size("num_experts_per_tok"),
        expert_intermediate_size=fields.size("moe_intermediate_size"),
        shared_intermediate_size=0,
        router_bias=False,
        scoring="softmax",
        normalize=fields.flag("norm_topk_prob"),
        scaling=1.0,
        num_groups=1,
        groups_per_token=1,
        dense_layers=tuple(i for i in range(layers) if i in without or (i + 1) % step),
    )


def _deepseek_experts(fields: Fields, layers: int) -> MixtureOfExperts:
    dense, inner = fields.count("first_k_dense_replace"), fields.size("moe_intermediate_size")
    return MixtureOfExperts(
        num_experts=fields.size("n_routed_experts", MAX_EXPERTS),
        experts_per_token=fields.size("num_experts_per_tok"),
        expert_intermediate_size=inner,
        shared_intermediate_size=inner * fields.count("n_shared_experts"),
        router_bias=True,
        scoring="sigmoid",
        normalize=fields.flag("norm_topk_prob", absent=True),
        scaling=fields.real("routed_scaling_factor"),
        num_groups=fields.size("n_group"),
        groups_per_token=fields.size("topk_group"),
        dense_layers=tuple(range(min(dense, layers))),
    )


def _mtp_layers(fields: Fields, family: Family) -> int:
    field = "num_nextn_predict_layers"
    return fields.count(field, MAX_LAYERS) if "mtp" in family.blocks and fields.has(field) else 0


def _fp8_block(fields: Fields, family: Family) -> tuple[int, int] | None:
    """[rows, columns] of the blocks of an FP8 checkpoint; None where it is not quantized."""
    field, key = "quantization_config", "weight_block_size"
    config = fields.values.get(field)
    if config is None:
        return None
    need = "only quant_method 'fp8' with a weight_block_size is read"
    if not isinstance(config, dict):
        raise fields.refusal(field, need)
    inner = Fields(fields.path, config, f"{field}.")
    for name, value in inner.values.items():
        if name in FP8 and value not in FP8[name]:
            raise inner.refusal(name, f"only {FP8[name][0]!r} is read")
        if name not in (*FP8, key, "modules_to_not_convert"):
            raise inner.refusal(name, "megarl does not know this field")
    block = inner.values.get(key)
    if not inner.has("quant_method") or not isinstance(block, list) or len(block) != 2:
        raise fields.refusal(field, need)
    if not all(is_integer(n) and 0 < n <= MAX_SIZE for n in block):
        raise inner.refusal(key, f"two positive integers are needed, up to {MAX_SIZE}")
    _check_unquantized(inner, family)
    return block[0], block[1]


def _check_unquantized(quantization: Fields, family: Family) -> None:
    """Refuse a list of unquantized modules that has one which the family's table quantizes."""
    field = "modules_to_not_convert"
    quantized = {
        weight.name
        for part in family.blocks.values()
        for weight in part.weights
        if weight.quantized
    }
    modules = quantization.values.get(field, [])
    if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
        raise quantization.refusal(field, "a list of module names is needed")
    for name in modules:
        general = re.sub(r"layers\.\d+\.", "layers.{layer}.", f"{name}.weight")
        general = re.sub(r"experts\.\d+\.", "experts.{expert}.", general)
        if general in quantized:
            raise quantization.refusal(field, "megarl takes this module for quantized", name)
