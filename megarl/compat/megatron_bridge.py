"""Family tables from Megatron-Bridge: what its parameter mappings say, in the words of families.

Owns the reading of mapping objects: their class's name, `megatron_param`, `hf_param` and
`permute_dims` are all that is looked at, so nothing of the package is imported to read them. A
mapping says which Hugging Face tensors a Megatron tensor is made of. How that tensor is cut is said
by megarl's own parts, since AutoMapping learns it only from the running module; where a mapping's
class does say it, the two must agree. Servers' tables are not in Megatron-Bridge: add them.

For: megatron-bridge 0.6.2 (https://github.com/NVIDIA-NeMo/Megatron-Bridge), which needs Python 3.12
and Transformer Engine. Its mapping classes and the registries of Llama, Qwen2, Qwen3, Qwen3-MoE,
DeepSeek-V3 and GLM-4.5 have been run with stand-ins for what they import, and read by this module;
`installed_tables` has not been run, its calls were read only. Ends when Megatron-Bridge has
mappings for SGLang too, or megarl has the tables of all models that are asked for.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from megarl.actor.families.dense import ENDS, MEGATRON, gated_mlp, grouped_query_attention
from megarl.actor.families.family import Cut, Held, Kind, Part
from megarl.actor.families.latent import latent_attention
from megarl.actor.families.moe import routed_experts, router, shared_experts
from megarl.actor.families.mtp import ENTRY_AND_FINAL_NORM, MEGATRON_LAYER, MEGATRON_MTP
from megarl.errors import LayoutError

PACKAGE_VERSIONS = ("0.6.2",)

# The classes that are read: the keys of hf_param in megarl's order (none where it is one name), and
# the cuts that the class can stand for.
READ: Mapping[str, tuple[tuple[str, ...], tuple[Cut, ...]]] = {
    "AutoMapping": ((), ("whole", "rows", "columns", "vocabulary")),
    "ColumnParallelMapping": ((), ("rows", "vocabulary")),
    "RowParallelMapping": ((), ("columns",)),
    "ReplicatedMapping": ((), ("whole",)),
    "DirectMapping": ((), ("whole",)),
    "QKVMapping": (("q", "k", "v"), ("grouped_qkv",)),
    "GatedMLPMapping": (("gate", "up"), ("rows",)),
}

_BY_HAND = "write its tensors into a family module by hand (docs/adding-a-model.md)"
REFUSED: Mapping[str, str] = {
    "RMSNorm2ZeroCenteredRMSNormMapping": "it adds 1 to the values, and plans only copy; "
    "build the Megatron model without layernorm_zero_centered_gamma",
    "QKVGMapping": f"no cut interleaves its gates; {_BY_HAND} once there is one",
    "KVMapping": f"no cut interleaves keys and values alone; {_BY_HAND} once there is one",
    "ConcatenatedQKVMapping": f"no cut takes rows out of one stored tensor; {_BY_HAND} once "
    "there is one",
    "FusedExpertMapping": "its checkpoint has one tensor for all experts; save the model with one "
    "for each",
    "FusedGatedExpertMapping": "its checkpoint has one tensor for all experts; save the model with "
    "one for each",
    "AmaxMapping": "it is of a quantizer, not of a weight; unset ENABLE_BRIDGE_QUANT_MAPPING",
    "AmaxFanoutMapping": "it is of a quantizer, not of a weight; unset ENABLE_BRIDGE_QUANT_MAPPING",
}


@dataclass(frozen=True)
class BridgeTables:
    """What the mappings of one model say: each kind of block without its servers' side.

    `left_out` are Megatron's names under `mtp.` that are in no table: those whose Hugging Face
    names do not carry the layer's number, and all of them where `num_layers` was not given.
    """

    blocks: Mapping[str, Part]
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    """One mapping, with names in megarl's form."""

    mapping_class: str
    megatron: str
    hf: tuple[str, ...]
    cuts: tuple[Cut, ...]


def installed_tables(
    model_dir: str, num_layers: int | None = None, ignore: Collection[str] = ()
) -> BridgeTables:
    """The tables of the checkpoint in `model_dir`, by the installed megatron-bridge.

    Raises LayoutError as `bridge_tables` does, ImportError where the package is not installed.
    """
    auto = importlib.import_module("megatron.bridge").AutoBridge
    bridge = auto.from_hf_pretrained(model_dir)._model_bridge
    return bridge_tables(bridge.mapping_registry(), num_layers, ignore)


def bridge_tables(
    mappings: Iterable[object], num_layers: int | None = None, ignore: Collection[str] = ()
) -> BridgeTables:
    """The tables that a mapping registry, or any list of mappings, amounts to.

    With `num_layers`, the model's number of decoder layers, MTP layers are read too. `ignore` are
    Megatron's names, as the mappings spell them, that the model does not have: some registries list
    such. Raises LayoutError naming the mapping whose class, name or cut is not known, and what to
    do.
    """
    entries = [
        _entry(mapping, num_layers)
        for mapping in mappings
        if _attribute(mapping, "megatron_param") not in ignore
    ]
    mapped = {entry.megatron for entry in entries}
    known = _known_blocks(mapped)
    names: dict[str, dict[Kind, str]] = {block: {} for block in known}
    left_out = []
    for entry in entries:
        places = [
            (block, held)
            for block, part in known.items()
            for held in part.megatron
            if held.name == entry.megatron
        ]
        numbered = all("{layer}" in name for name in (entry.megatron, *entry.hf))
        if not places or (entry.megatron.startswith("mtp.") and not numbered):
            if not entry.megatron.startswith("mtp."):
                raise LayoutError(
                    f"megatron-bridge: {entry.megatron} is no tensor of the blocks that megarl "
                    f"knows; if the model does not have it, ignore it, else {_BY_HAND}"
                )
            left_out.append(entry.megatron)
            continue
        for block, held in places:
            _check_cut(entry, held)
            for kind, name in zip(held.kinds, entry.hf, strict=True):
                if names[block].setdefault(kind, name) != name:
                    raise LayoutError(
                        f"megatron-bridge: {entry.megatron} holds {name}, another mapping of the "
                        f"same {kind} {names[block][kind]}; megarl knows one tensor of each kind"
                    )
    blocks = {b: _part(part, names[b], mapped) for b, part in known.items() if names[b]}
    return BridgeTables(blocks, tuple(dict.fromkeys(left_out)))


def _entry(mapping: object, num_layers: int | None) -> _Entry:
    """What one mapping object says. Raises LayoutError where its class is not read."""
    name = type(mapping).__name__
    megatron = _attribute(mapping, "megatron_param")
    if name not in READ:
        reason = REFUSED.get(name, f"megarl does not know what it computes; {_BY_HAND}")
        raise LayoutError(f"megatron-bridge: {megatron} has a {name}: {reason}")
    keys, cuts = READ[name]
    found = _attribute(mapping, "hf_param")
    if isinstance(found, str) == bool(keys) or (keys and set(found) != set(keys)):
        raise LayoutError(
            f"megatron-bridge: the {name} of {megatron} has hf_param {found!r}, not "
            f"{'a name for each of ' + ', '.join(keys) if keys else 'one name'}; this module is "
            f"for megatron-bridge {' and '.join(PACKAGE_VERSIONS)}"
        )
    if getattr(mapping, "permute_dims", None) is not None:
        raise LayoutError(
            f"megatron-bridge: the {name} of {megatron} permutes dims, and plans only copy; "
            f"{_BY_HAND} once there is a cut for it"
        )
    hf = (found,) if isinstance(found, str) else tuple(found[key] for key in keys)
    if not megatron.startswith("mtp."):
        return _Entry(name, _marked(megatron), tuple(map(_marked, hf)), cuts)
    own = _mtp_layer(megatron, num_layers)
    general = re.sub(r"^mtp\.layers\.(\d+|\*)\.", "mtp.layers.{layer}.", megatron)
    return _Entry(name, _marked(general), tuple(_marked(n, own) for n in hf), cuts)


def _mtp_layer(megatron: str, num_layers: int | None) -> str:
    """The number in the checkpoint of the MTP layer that a Megatron name is of; "" if unknown."""
    number = re.match(r"mtp\.layers\.(\d+)\.", megatron)
    return "" if number is None or num_layers is None else str(num_layers + int(number[1]))


def _attribute(mapping: object, name: str) -> str:
    if not hasattr(mapping, name):
        raise LayoutError(
            f"megatron-bridge: a {type(mapping).__name__} has no {name}, so it is no mapping; give "
            "what a bridge's mapping_registry() returns"
        )
    value: str = getattr(mapping, name)
    return value


def _marked(name: str, layer: str = "*") -> str:
    """A name with `{layer}` for its layer's number or wildcard, `{expert}` for another wildcard.

    >>> _marked("decoder.layers.*.mlp.experts.linear_fc1.weight*")
    'decoder.layers.{layer}.mlp.experts.linear_fc1.weight{expert}'
    >>> _marked("model.layers.61.mlp.experts.*.up_proj.weight", "61")
    'model.layers.{layer}.mlp.experts.{expert}.up_proj.weight'
    """
    return name.replace(f"layers.{layer}.", "layers.{layer}.", 1).replace("*", "{expert}")


def _known_blocks(mapped: set[str]) -> dict[str, Part]:
    """megarl's parts of the blocks that the mapped names belong to."""
    latent = f"{MEGATRON}self_attention.linear_kv_down_proj.weight" in mapped
    attention = latent_attention if latent else grouped_query_attention
    blocks = dict(ENDS)
    if f"{MEGATRON}mlp.linear_fc1.weight" in mapped:
        blocks["dense"] = attention() + gated_mlp()
    if f"{MEGATRON}mlp.router.weight" in mapped:
        blocks["moe"] = attention() + router() + routed_experts() + shared_experts()
    if f"{MEGATRON_MTP}eh_proj.weight" in mapped:
        layer = attention(megatron=MEGATRON_LAYER)
        if f"{MEGATRON_LAYER}mlp.router.weight" in mapped:
            for part in (router, routed_experts, shared_experts):
                layer += part(megatron=MEGATRON_LAYER)
        else:
            layer += gated_mlp(megatron=MEGATRON_LAYER)
        blocks["mtp"] = ENTRY_AND_FINAL_NORM + layer
    return blocks


def _check_cut(entry: _Entry, held: Held) -> None:
    if held.cut not in entry.cuts or len(held.kinds) != len(entry.hf):
        raise LayoutError(
            f"megatron-bridge: {entry.megatron} has a {entry.mapping_class} of {len(entry.hf)} "
            f"tensors, but megarl cuts it as {held.cut} of {', '.join(held.kinds)}; one of the two "
            "is wrong for this model"
        )


def _part(known: Part, names: Mapping[Kind, str], mapped: set[str]) -> Part:
    """What of a known part is mapped, under the mappings' Hugging Face names."""

    def held() -> Iterator[Held]:
        for tensor in known.megatron:
            if tensor.name in mapped and names.keys() >= set(tensor.kinds):
                yield tensor

    weights = (replace(w, name=names[w.kind]) for w in known.weights if w.kind in names)
    return Part(tuple(weights), tuple(held()))
